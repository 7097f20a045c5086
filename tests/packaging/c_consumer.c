/* SPDX-License-Identifier: Apache-2.0 */
/* A C program that links the compiled data plane. */
#include "kvcache/kvcache.h"

int main(void) { return 0; }
