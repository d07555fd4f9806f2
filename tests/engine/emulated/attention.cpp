// engine/devices/cpu/attention/attention.cpp for a CPU with AVX512-BF16 and AMX-BF16, whose instructions are emulated on
// any other.
#include "immintrin.h"

#include <sys/syscall.h>
#include <unistd.h>

#define syscall(...) 0   // Linux grants the tile registers
#undef __AVX512DQ__      // what else there is of AVX-512 is not emulated
#undef __AVX512VNNI__
#undef __AVX512F__
#define __AVX512F__
#undef __AVX512BW__
#define __AVX512BW__
#undef __AVX512BF16__
#define __AVX512BF16__
#undef __AMX_BF16__
#define __AMX_BF16__

#include "../../../engine/devices/cpu/attention/attention.cpp"
