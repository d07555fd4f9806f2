// KV in int8 on the wire: packed and unpacked in one pass, where torch takes one pass per operation.
//
// The results equal convert.py's, bit by bit.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr float LARGEST_CODE = 127.0f;

float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// A pool's value by its bits. Without the sign bit, bits compare like magnitudes.
struct Float32 {
    using Bits = uint32_t;
    static float load(Bits bits) { return as_float(bits); }
    static Bits store(float value) { return bits_of(value); }
};

struct BFloat16 {
    using Bits = uint16_t;
    static float load(Bits bits) { return as_float(static_cast<uint32_t>(bits) << 16); }
    static Bits store(float value) {  // rounded to nearest, ties to even
        const uint32_t bits = bits_of(value);
        return static_cast<Bits>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
};

template <typename Value>
float largest_magnitude(const typename Value::Bits* values, int64_t tokens, int64_t stride, int64_t width) {
    using Bits = typename Value::Bits;
    Bits top = 0;
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t at = 0; at < width; ++at)
            top = std::max<Bits>(top, values[token * stride + at] & std::numeric_limits<Bits>::max() >> 1);
    return Value::load(top);
}

template <typename Value>
void encode(int8_t* codes, const typename Value::Bits* values, float inverse, int64_t tokens, int64_t stride,
            int64_t width) {
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t at = token * stride; at < token * stride + width; ++at)
            codes[at] = static_cast<int8_t>(std::nearbyint(Value::load(values[at]) * inverse));
}

template <typename Value>
int64_t pack(char* out, int64_t out_bytes, int64_t scales_start, const char* pool, int64_t pool_bytes,
             const int64_t* blocks, const int64_t* num_tokens, int64_t count, int64_t planes, int64_t block_size,
             int64_t heads, int64_t width, float smallest, float largest) {
    const int64_t stride = heads * width, plane_values = block_size * stride;
    for (int64_t group = 0; group < count * planes * heads; ++group) {
        const int64_t head = group % heads, plane = group / heads % planes, row = group / heads / planes;
        const int64_t start = plane * plane_values + head * width, tokens = num_tokens[row];
        const auto* values = reinterpret_cast<const typename Value::Bits*>(pool + blocks[row] * pool_bytes) + start;
        auto* codes = reinterpret_cast<int8_t*>(out + row * out_bytes) + start;
        auto* scale = reinterpret_cast<float*>(out + row * out_bytes + scales_start) + plane * heads + head;
        const float top = largest_magnitude<Value>(values, tokens, stride, width);
        if (!(top <= largest)) return group;
        *scale = top < smallest ? 0.0f : top / LARGEST_CODE;
        encode<Value>(codes, values, top < smallest ? 0.0f : 1.0f / *scale, tokens, stride, width);
        for (int64_t token = tokens; token < block_size; ++token)
            std::memset(codes + token * stride, 0, width);
    }
    return -1;
}

template <typename Value>
void unpack(char* pool, int64_t pool_bytes, const int64_t* targets, const char* wire, int64_t wire_bytes,
            const int64_t* sources, int64_t scales_start, int64_t count, int64_t tokens, int64_t planes,
            int64_t block_size, int64_t heads, int64_t width) {
    const int64_t stride = heads * width, plane_values = block_size * stride;
    for (int64_t row = 0; row < count; ++row)
        for (int64_t plane = 0; plane < planes; ++plane) {
            const char* block = wire + sources[row] * wire_bytes;
            const auto* scales = reinterpret_cast<const float*>(block + scales_start) + plane * heads;
            const auto* codes = reinterpret_cast<const int8_t*>(block) + plane * plane_values;
            auto* values = reinterpret_cast<typename Value::Bits*>(pool + targets[row] * pool_bytes) +
                           plane * plane_values;
            for (int64_t at = 0; at < tokens * stride; at += width) {
                const float scale = scales[at / width % heads];
                for (int64_t element = at; element < at + width; ++element)
                    values[element] = Value::store(static_cast<float>(codes[element]) * scale);
            }
        }
}

}  // namespace

// Packs the pool's `blocks`, in order, to `out`. `pool` points at block 0's values [planes, block_size, heads, width],
// `out` at the first block's codes, with the scales `scales_start` bytes after. Only `num_tokens` tokens count.
//
// Returns -1, or the first group (row, plane, head) whose largest magnitude is not at most `largest`.
extern "C" int64_t tandem_pack(int32_t value_bytes, char* out, int64_t out_bytes, int64_t scales_start,
                               const char* pool, int64_t pool_bytes, const int64_t* blocks,
                               const int64_t* num_tokens, int64_t count, int64_t planes, int64_t block_size,
                               int64_t heads, int64_t width, float smallest, float largest) {
    const auto run = value_bytes == 4 ? pack<Float32> : pack<BFloat16>;
    return run(out, out_bytes, scales_start, pool, pool_bytes, blocks, num_tokens, count, planes, block_size,
               heads, width, smallest, largest);
}

// Writes the first `tokens` tokens of the wire's blocks `sources` to the pool's blocks `targets`. `wire` and
// `pool` point at the values of block 0; the scales begin `scales_start` bytes after `wire`.
extern "C" void tandem_unpack(int32_t value_bytes, char* pool, int64_t pool_bytes, const int64_t* targets,
                              const char* wire, int64_t wire_bytes, const int64_t* sources, int64_t scales_start,
                              int64_t count, int64_t tokens, int64_t planes, int64_t block_size, int64_t heads,
                              int64_t width) {
    const auto run = value_bytes == 4 ? unpack<Float32> : unpack<BFloat16>;
    run(pool, pool_bytes, targets, wire, wire_bytes, sources, scales_start, count, tokens, planes, block_size,
        heads, width);
}
