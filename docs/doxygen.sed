# SPDX-License-Identifier: Apache-2.0
# Reads a header as Doxygen should: the paragraph below `#pragma once` describes the file, and lines of a comment
# that are indented by three or more spaces are a drawing, which becomes a code block. Line numbers stay.
/^#pragma once$/,/^([^\/]|$)/ {
  s/^#pragma once$/\/\/\/ @file/
  s/^\/\/( |$)/\/\/\/\1/
}
s/^([ \t]*\/\/\/)   /\1       /
