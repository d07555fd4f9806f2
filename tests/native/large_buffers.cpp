// Large buffers in huge pages, for a test.
#include "../../native/cache_lines.h"

extern "C" char* tandem_make_buffer(int64_t bytes) { return InHugePages<char>().allocate(bytes); }
extern "C" void tandem_free_buffer(char* buffer, int64_t bytes) { InHugePages<char>().deallocate(buffer, bytes); }
