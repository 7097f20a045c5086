// SPDX-License-Identifier: Apache-2.0
// A C99 program that links the compiled data plane: rotary tables are the smallest call that computes
// something.
#include <stdio.h>

#include "kvcache/kvcache.h"

int main(void) {
  float table[2 * 1 * 2];
  kvc_rope rope = {0};
  kvc_error error = {0};
  kvc_status status;
  rope.struct_size = (uint32_t)sizeof(rope);
  rope.style = KVC_ROPE_INTERLEAVED;
  rope.dims = 2;
  rope.theta = 10000.0;
  status = kvc_cpu_rope_table(&rope, 2, table, &error);
  printf("%s, %s: cos 1 = %.9g\n", kvc_status_text(status), kvc_field_text(error.field), table[2]);
  if (status != KVC_OK || table[0] != 1.0f || table[1] != 0.0f) return 1;
  return table[2] > 0.5403f && table[2] < 0.5404f ? 0 : 1;
}
