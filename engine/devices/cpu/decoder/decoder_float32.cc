// The decoder in float32. This is no .cpp, which every host compiles at its first start: few serve float32.

#define IN_FLOAT32
#include "decoder.cpp"
