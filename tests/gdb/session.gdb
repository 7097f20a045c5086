# SPDX-License-Identifier: Apache-2.0
# What printers.sh compares: everything from the first `==` line on.
up
set print pretty on
echo == what docs/debugging.md shows\n
echo # [shown]\n
echo (gdb) print seq\n
print seq
echo (gdb) print refused\n
print refused
echo (gdb) kvcache tree cache\n
kvcache tree cache
echo (gdb) print $kvcache_core(cache).commands\n
print $kvcache_core(cache).commands
echo # [shown]\n
echo == a cache\n
print cache
echo == sequences\n
print first
print branch
print closed
print seq.place_
echo == inside a cache\n
print $kvcache_core(cache).seqs
print $kvcache_core(cache).tree.tree_
print $kvcache_core(cache).tree
print $kvcache_core(cache).pool.pool_._M_elems[0].meta_.size_
print $kvcache_core(cache).unit_blocks
print $kvcache_core(cache).seqs.state_.data_[0].scopes
print $kvcache_core(cache).seqs.state_.data_[2]
echo == values\n
print refused
print failed
print fine
print absent
print node
print table
print size
print some
print scope
print broken
echo == the tree\n
kvcache tree cache
kvcache tree made
echo == what is not a cache\n
kvcache tree size
