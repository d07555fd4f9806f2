// engine/linear/product.cpp for a CPU with AVX512-BF16, AVX512-VNNI and, unless WITHOUT_AMX, AMX-BF16, whose instructions
// are emulated on any other.
#include "immintrin.h"

#include <sys/syscall.h>
#include <unistd.h>

#define syscall(...) 0  // Linux grants the tile registers
#undef __AVX512F__      // what else there is of AVX-512 is not emulated
#undef __AVX512BW__
#undef __AVX512DQ__
#undef __AVX2__
#ifndef __AVX512BF16__
#define __AVX512BF16__
#endif
#ifndef __AVX512VNNI__
#define __AVX512VNNI__
#endif
#undef __AMX_BF16__
#ifndef WITHOUT_AMX
#define __AMX_BF16__
#endif

#include "../../../engine/linear/product.cpp"
