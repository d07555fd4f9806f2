// Texts to draft for, and the search for earlier occurrences of a text's last tokens.

#pragma once

#include <algorithm>
#include <cstdint>

// `size` texts of lengths[i] tokens each. Text i gets found[i] draft tokens, at most counts[i], written from
// drafts[i * stride] on.
struct Batch {
    const int32_t* const* texts;
    const int64_t *lengths, *counts;
    int32_t* drafts;
    int64_t* found;
    int64_t size, stride;
};

// The number of tokens ending at `place` that equal the text's last ones, up to `longest`.
inline int64_t matched(const int32_t* text, int64_t length, int64_t place, int64_t longest) {
    longest = std::min(longest, place + 1);
    int64_t count = 0;
    while (count < longest && text[place - count] == text[length - 1 - count]) count++;
    return count;
}

// Whether one of COUNT places has the token `last`, and the place `before` tokens earlier the token `first`. Without
// an early exit the compiler vectorizes the loop.
template <int64_t COUNT> bool contains(const int32_t* places, int32_t last, int64_t before, int32_t first) {
    bool found = false;
    for (int64_t i = 0; i < COUNT; i++) found |= (places[i] == last) & (places[i - before] == first);
    return found;
}

// Calls visit(place, length) for each earlier place where at least `wanted` of the text's last tokens end, the most
// recent first; `length` tokens match, at most `longest`. visit returns the new `wanted`: above `longest` to stop.
template <class Visit>
void for_each_repeat(const int32_t* text, int64_t length, int64_t wanted, int64_t longest, Visit visit) {
    constexpr int64_t BLOCK = 64;
    if (wanted >= length) return;
    for (int64_t end = length - 1; end > 0; end -= BLOCK) {
        const int64_t begin = std::max<int64_t>(0, end - BLOCK), before = wanted - 1;
        const bool whole = begin - before >= 0 && end - begin == BLOCK && wanted <= length;
        if (whole && !contains<BLOCK>(text + begin, text[length - 1], before, text[length - 1 - before])) continue;
        for (int64_t place = end - 1; place >= begin; place--) {
            if (text[place] != text[length - 1]) continue;
            const int64_t count = matched(text, length, place, longest);
            if (count >= wanted) wanted = visit(place, count);
            if (wanted > longest) return;
        }
    }
}
