# SPDX-License-Identifier: Apache-2.0
"""Pretty-printers of kvcache for gdb, a command and a function.

    (gdb) source /usr/local/share/kvcache/gdb/kvcache.py      (or share/gdb/kvcache.py of the sources)
    (gdb) print cache
    (gdb) print seq
    (gdb) kvcache tree cache                the prefix tree, a line per node
    (gdb) print $kvcache_core(cache).seqs   a part of a cache: geo, pool, tree, scopes, seqs, commands

They read memory only, never call a function of the program, so they also work on a core file. Where they meet a layout
they do not know (another version of the library) they say so instead of guessing.
"""
import gdb
import gdb.printing

OPERATIONS = ("copy", "copy open", "seal", "zero", "rotate", "gather")
SCOPE_TAGS = {1: "shared", 2: "tenant", 3: "adapter", 4: "generation", 5: "media", 6: "weights", 7: "codec", 8: "border"}
MOST_TOKENS = 8  # of a node's tokens that are shown


# ---- reading -------------------------------------------------------------------------------------------------------
def enumerator(value):
    """Name of an enumerator without its scope."""
    return str(value).rsplit("::", 1)[-1]


def number_of(id_value):
    """The number of an id, -1 if it stands for nothing: gdb takes an enum without negative names for unsigned."""
    number = int(id_value) & 0xFFFFFFFF
    return number - (1 << 32) if number >> 31 else number


def text_of_id(value, noun):
    number = number_of(value)
    return f"no {noun}" if number < 0 else f"{noun} {number}"


def array_size(array):
    return int(array["size_"])


def items(array, first=0, count=None):
    """Values of a fixed_array from `first` on."""
    data = array["data_"]
    if count is None:
        count = array_size(array) - first
    return [data[i] for i in range(first, first + count)]


def ids(values):
    """Short text of block ids: runs of consecutive ones are joined, absent ones are '-'."""
    numbers = [number_of(v) for v in values]
    parts = []
    i = 0
    while i < len(numbers):
        j = i
        while j + 1 < len(numbers) and numbers[i] >= 0 and numbers[j + 1] == numbers[j] + 1:
            j += 1
        parts.append("-" if numbers[i] < 0 else str(numbers[i]) if j == i else
                     f"{numbers[i]} {numbers[j]}" if j == i + 1 else f"{numbers[i]}..{numbers[j]}")
        i = j + 1
    return "[" + " ".join(parts) + "]"


def tokens_text(values):
    shown = [str(int(v)) for v in values[:MOST_TOKENS]]
    return "[" + " ".join(shown) + (" ..." if len(values) > MOST_TOKENS else "") + "]"


def bytes_text(count):
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count} bytes ({count / size:.1f} {unit})"
    return f"{count} bytes"


def target_of(unique_ptr):
    """What a std::unique_ptr points to, for libstdc++ and libc++; None if null."""
    for field in unique_ptr.type.strip_typedefs().fields():
        if field.name == "_M_t":  # unique_ptr -> __uniq_ptr_impl -> tuple -> ... -> head
            pointer = first_pointer(unique_ptr["_M_t"])
            break
        if field.name == "__ptr_":
            pointer = first_pointer(unique_ptr["__ptr_"])
            break
    else:
        raise gdb.error("this std::unique_ptr is not known")
    return None if int(pointer) == 0 else pointer.dereference()


def first_pointer(value):
    """The first pointer inside a value, depth first."""
    kind = value.type.strip_typedefs()
    if kind.code == gdb.TYPE_CODE_PTR:
        return value
    if kind.code == gdb.TYPE_CODE_STRUCT:
        for field in kind.fields():
            if hasattr(field, "bitpos"):
                found = first_pointer(value[field])
                if found is not None:
                    return found
    return None


def element(std_array, i):
    """Entry i of a std::array."""
    for name in ("_M_elems", "__elems_"):
        if any(field.name == name for field in std_array.type.strip_typedefs().fields()):
            return std_array[name][i]
    raise gdb.error("this std::array is not known")


def scope_key(data, size):
    """Text of a canonical scope key: its parts, each | tag | length, 2 bytes | value |."""
    raw = bytes(int(data[i]) & 0xFF for i in range(size))
    parts, at = [], 0
    while at + 3 <= len(raw):
        tag, length = raw[at], raw[at + 1] | raw[at + 2] << 8
        value = raw[at + 3:at + 3 + length]
        at += 3 + length
        name = SCOPE_TAGS.get(tag, f"tag {tag}")
        if name == "shared":
            parts.append(name)
        elif name == "codec":
            parts.append(f"codec {int.from_bytes(value, 'little'):#x}")
        elif name in ("generation", "weights", "border"):
            parts.append(f"{name} {int.from_bytes(value, 'little')}")
        else:
            printable = all(32 <= b < 127 for b in value)
            parts.append(f'{name} "{value.decode("ascii")}"' if printable else f"{name} 0x{value.hex()}")
    return ", ".join(parts)


class Sequence:
    """One place of detail::sequences."""

    def __init__(self, seqs, place):
        self.seqs, self.place = seqs, place
        self.state = seqs["state_"]["data_"][place]
        self.geo = seqs["geo_"]

    def live(self):
        return bool(self.state["live"])

    def groups(self):
        return int(self.geo["groups"])

    def table(self, name, g):
        columns = int(self.geo["group"][g]["columns"])
        return items(element(self.seqs[name], g), self.place * columns, int(self.state["columns"][g]))

    def path(self):
        return items(self.seqs["path_"], self.place * int(self.seqs["path_columns_"]), int(self.state["path"]))

    def lengths(self):
        s = self.state
        text = f"held {int(s['held'])}, accepted {int(s['accepted'])}, committed {int(s['committed'])}"
        return text + f", reused {int(s['reused'])}, account {int(s['account'])}"

    def children(self):
        for g in range(self.groups()):
            which = "" if self.groups() == 1 else f"[{g}]"
            yield f"table{which}", ids(self.table("table_", g))
            if self.geo["group"][g]["format"]["lossy"]:
                yield f"open table{which}", ids(self.table("open_", g))
                yield f"sealed{which}", str(int(self.state["sealed"][g]))
        yield "path", ids(self.path())


class Tree:
    """The nodes of a basic_radix_tree, and what detail::nodes knows of them if it is given."""

    def __init__(self, tree, nodes=None):
        self.tree, self.nodes = tree, nodes
        self.capacity = array_size(tree["node_"])
        self.size = int(tree["used_"]) - int(tree["top_"])
        self.unit = int(tree["unit_"])

    def node(self, r):
        return self.tree["node_"]["data_"][r]

    def siblings(self, r):
        while r >= 0:
            yield r
            r = number_of(self.node(r)["next"])

    def walk(self):
        """Yields (node, depth), parents first, children in the order of their ids."""
        todo = [(r, 0) for r in sorted(self.siblings(number_of(self.tree["first_"])), reverse=True)]
        while todo:
            r, depth = todo.pop()
            yield r, depth
            todo += [(c, depth + 1) for c in sorted(self.siblings(number_of(self.node(r)["first"])), reverse=True)]

    def line(self, r):
        n = self.node(r)
        text = f"tokens {tokens_text(items(self.tree['label_'], r * self.unit, self.unit))}"
        parent = number_of(n["parent"])
        text += f", parent {parent if parent >= 0 else 'none'}, children {int(n['children'])}"
        text += f", scope {int(n['scope'])}"
        if self.nodes is not None:
            state = self.nodes["state_"]["data_"][r]
            per_node = int(self.nodes["geo_"]["blocks_per_unit"])
            text += f", pins {int(state['pins'])}, lane {int(state['lane'])}, last {int(state['last'])}"
            text += f", blocks {ids(items(self.nodes['blocks_'], r * per_node, per_node))}"
        return text


# ---- printers ------------------------------------------------------------------------------------------------------
class Printer:
    """Base: `text` and `parts` of a subclass, and one answer for every layout that is not known."""

    def __init__(self, value):
        self.value = value

    def to_string(self):
        try:
            return self.text()
        except (gdb.error, KeyError, ValueError, TypeError) as error:
            return f"<kvcache: this layout is not known: {error}>"

    def parts(self):
        return ()

    def children(self):
        try:
            yield from self.parts()
        except (gdb.error, KeyError, ValueError, TypeError) as error:
            yield "error", f"<kvcache: this layout is not known: {error}>"


class BlockId(Printer):
    def text(self):
        return text_of_id(self.value, "block")


class NodeId(Printer):
    def text(self):
        return text_of_id(self.value, "node")


class Bytes(Printer):
    def text(self):
        return bytes_text(int(self.value["count"]))


class Blocks(Printer):
    def text(self):
        return f"{int(self.value['count'])} blocks"


def status_text(value):
    code = enumerator(value["code"])
    if code == "ok":
        return "ok"
    field = value["field"].string()
    number = int(value["value"])
    if not field:
        return code
    return f"{code} ({field} = {number})"


class Status(Printer):
    def text(self):
        return status_text(self.value)


class Result(Printer):
    def failed(self):
        return enumerator(self.value["error_"]["code"]) != "ok"

    def simple(self):
        return self.value["value_"].type.strip_typedefs().code != gdb.TYPE_CODE_STRUCT

    def text(self):
        if self.failed():
            return f"error: {status_text(self.value['error_'])}"
        return f"value {self.value['value_']}" if self.simple() else "value"

    def parts(self):
        if not self.failed() and not self.simple():
            yield "value", self.value["value_"]


class FixedArray(Printer):
    def text(self):
        return f"fixed_array of {array_size(self.value)}"

    def parts(self):
        for i in range(array_size(self.value)):
            yield f"[{i}]", self.value["data_"][i]

    def display_hint(self):
        return "array"


class IdSpan(Printer):
    """std::span of block or node ids: a table, a path."""

    def text(self):
        extent = self.value["_M_extent"]
        if extent.type.strip_typedefs().code == gdb.TYPE_CODE_STRUCT:
            extent = extent["_M_extent_value"]
        return ids([self.value["_M_ptr"][i] for i in range(int(extent))])


class BlockPool(Printer):
    def text(self):
        p = self.value
        total = array_size(p["meta_"])
        return (f"block_pool: {int(p['used_'])} used + {int(p['cached_'])} cached + {int(p['top_'])} free"
                f" = {total} blocks")

    def parts(self):
        p = self.value
        free = items(p["free_"], 0, int(p["top_"]))
        yield "next", ids(list(reversed(free[-8:])))
        for i in range(array_size(p["meta_"])):
            meta = int(p["meta_"]["data_"][i])
            if meta != 0:
                yield f"[{i}]", f"shares {meta >> 32}, nodes {meta & 0xFFFFFFFF}"


class CommandList(Printer):
    def text(self):
        return f"{int(self.value['size_'])} commands in {int(self.value['stages_'])} stages"

    def parts(self):
        for i, c in enumerate(items(self.value["list_"], 0, int(self.value["size_"]))):
            op = int(c["op"])
            name = OPERATIONS[op] if op < len(OPERATIONS) else f"operation {op}"
            text = f"stage {int(c['stage'])}: {name} {int(c['tokens'])} tokens"
            if int(c["src"]) != int(c["dst"]):
                text += f" of block {int(c['src'])} to"
            yield f"[{i}]", f"{text} block {int(c['dst'])}, group {int(c['group'])}"


class Scope(Printer):
    def text(self):
        if enumerator(self.value["error_"]["code"]) != "ok":
            return f"invalid scope: {status_text(self.value['error_'])}"
        parts = []
        for i in range(int(self.value["count_"])):
            s = self.value["segment_"][i]
            where = "" if i == 0 else f"from token {int(s['first'])}: "
            parts.append(where + scope_key(s["data"], int(s["size"])))
        return "scope: " + "; ".join(parts)


class ScopeIds(Printer):
    def text(self):
        v = self.value
        parts = [f"{int(v['id'][i])} from unit {int(v['first_unit'][i])}" for i in range(int(v["count"]))]
        return "scopes " + ", ".join(parts) if parts else "no scope"


class ScopeTable(Printer):
    def text(self):
        return f"{int(self.value['used_'])} scopes of {array_size(self.value['entry_'])}"

    def parts(self):
        for i, e in enumerate(items(self.value["entry_"], 0, int(self.value["limit_"]))):
            if int(e["refs"]) != 0:
                yield f"[{i}]", f"{scope_key(e['data'], int(e['size']))}; references {int(e['refs'])}"


class RadixTree(Printer):
    def text(self):
        t = Tree(self.value)
        return f"radix tree: {t.size} nodes of {t.capacity}, {t.unit} tokens each"

    def parts(self):
        t = Tree(self.value)
        for r, _ in t.walk():
            yield f"[{r}]", t.line(r)


class Nodes(Printer):
    def text(self):
        t = Tree(self.value["tree_"])
        return (f"{t.size} cached nodes of {t.capacity}; stored {int(self.value['stored_'])},"
                f" evicted {int(self.value['evicted_'])}")

    def parts(self):
        t = Tree(self.value["tree_"], self.value)
        for r, _ in t.walk():
            yield f"[{r}]", t.line(r)


class SequenceState(Printer):
    def text(self):
        s = self.value
        if not s["live"]:
            return "vacant"
        return f"held {int(s['held'])}, accepted {int(s['accepted'])}, committed {int(s['committed'])}"


class Sequences(Printer):
    def capacity(self):
        return array_size(self.value["state_"])

    def text(self):
        return f"{self.capacity() - int(self.value['top_'])} sequences of {self.capacity()}"

    def parts(self):
        for i in range(self.capacity()):
            s = Sequence(self.value, i)
            if s.live():
                tables = ", ".join(f"{name} {text}" for name, text in s.children())
                yield f"[{i}]", f"{s.lengths()}, {tables}"


class BasicSequence(Printer):
    def sequence(self):
        if int(self.value["core_"]) == 0:
            return None
        s = Sequence(self.value["core_"].dereference()["seqs"], int(self.value["place_"]))
        return s if int(s.state["generation"]) == int(self.value["generation_"]) and s.live() else None

    def text(self):
        s = self.sequence()
        return "closed sequence" if s is None else f"sequence {s.place}: {s.lengths()}"

    def parts(self):
        s = self.sequence()
        if s is not None:
            yield from s.children()


class Core(Printer):
    def text(self):
        return core_text(self.value)

    def parts(self):
        return core_parts(self.value)


class BasicCache(Printer):
    def text(self):
        core = target_of(self.value["core_"])
        return "cache that was never created" if core is None else core_text(core)

    def parts(self):
        core = target_of(self.value["core_"])
        return () if core is None else core_parts(core)


def core_text(core):
    seqs, nodes = core["seqs"], Tree(core["tree"]["tree_"])
    capacity = array_size(seqs["state_"])
    return (f"cache: {capacity - int(seqs['top_'])} sequences of {capacity}, {nodes.size} nodes of {nodes.capacity},"
            f" {int(core['commands']['size_'])} commands, step {int(core['counters']['steps'])},"
            f" clock {int(core['clock'])}")


def core_parts(core):
    geo = core["geo"]
    for g in range(int(geo["groups"])):
        x = geo["group"][g]
        yield f"group {g}", f"{int(x['total'])} blocks of {int(x['block_size'])} tokens, {int(x['shape']['layers'])} layers"
        yield f"pool {g}", element(core["pool"]["pool_"], g)
    yield "sequences", core["seqs"]
    yield "nodes", core["tree"]
    yield "scopes", core["scopes"]
    yield "commands", core["commands"]


def collection():
    printers = gdb.printing.RegexpCollectionPrettyPrinter("kvcache")
    name = "^kvcache::"
    for regex, printer in ((name + "block_id$", BlockId), (name + "node_id$", NodeId), (name + "bytes$", Bytes),
                           (name + "blocks$", Blocks), (name + "status$", Status), (name + "result<.*>$", Result),
                           (name + "fixed_array<.*>$", FixedArray), (name + "block_pool$", BlockPool),
                           (name + "command_list$", CommandList), (name + "scope$", Scope),
                           (name + "scope_ids$", ScopeIds), (name + "scope_table$", ScopeTable),
                           (name + "basic_radix_tree<.*>$", RadixTree), (name + "basic_sequence<.*>$", BasicSequence),
                           (name + "basic_cache<.*>$", BasicCache), (name + "detail::core<.*>$", Core),
                           (name + "detail::nodes<.*>$", Nodes), (name + "detail::sequences$", Sequences),
                           (name + "detail::sequence_state$", SequenceState),
                           (r"^std::span<(const )?kvcache::(block|node)_id( const)?, .*>$", IdSpan)):
        printers.add_printer(printer.__name__, regex, printer)
    return printers


# ---- command -------------------------------------------------------------------------------------------------------
class KvcacheCommand(gdb.Command):
    """Commands for programs that use kvcache."""

    def __init__(self):
        super().__init__("kvcache", gdb.COMMAND_DATA, prefix=True)


class KvcacheTreeCommand(gdb.Command):
    """Draws the prefix tree of a cache: kvcache tree EXPRESSION
A line per node, children indented below their parent, with tokens, pins, account and blocks. Unpinned nodes (pins 0)
are what eviction may take."""

    def __init__(self):
        super().__init__("kvcache tree", gdb.COMMAND_DATA, gdb.COMPLETE_EXPRESSION)

    def invoke(self, argument, from_tty):
        if not argument.strip():
            raise gdb.GdbError("kvcache tree EXPRESSION: an expression for a cache is needed")
        nodes = core_of(gdb.parse_and_eval(argument))["tree"]
        tree = Tree(nodes["tree_"], nodes)
        print(f"{tree.size} nodes of {tree.capacity}, {tree.unit} tokens each")
        for r, depth in tree.walk():
            print(f"{'  ' * depth}node {r}: {tree.line(r)}")


class KvcacheCoreFunction(gdb.Function):
    """$kvcache_core(CACHE): the state of a cache, whose members can be printed: geo, pool, tree, scopes, seqs, commands."""

    def __init__(self):
        super().__init__("kvcache_core")

    def invoke(self, cache):
        return core_of(cache)


def core_of(value):
    """The detail::core of a basic_cache, of a pointer or reference to one, or of a result that holds one."""
    if value.type.strip_typedefs().code in (gdb.TYPE_CODE_PTR, gdb.TYPE_CODE_REF):
        value = value.referenced_value()
    kind = value.type.strip_typedefs().name or "value without a type"
    if kind.startswith("kvcache::result<"):
        value = value["value_"]
        kind = value.type.strip_typedefs().name
    if kind.startswith("kvcache::detail::core<"):
        return value
    if not kind.startswith("kvcache::basic_cache<"):
        raise gdb.GdbError(f"a {kind} is not a cache")
    core = target_of(value["core_"])
    if core is None:
        raise gdb.GdbError("this cache was never created")
    return core


gdb.printing.register_pretty_printer(gdb.current_objfile(), collection(), replace=True)
KvcacheCommand()
KvcacheTreeCommand()
KvcacheCoreFunction()
