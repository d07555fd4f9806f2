// The decoder in float32. Not named .cpp, since every host compiles all .cpp at its first start, and few serve float32.

#define IN_FLOAT32
#include "decoder.cpp"
