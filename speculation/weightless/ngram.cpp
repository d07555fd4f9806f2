// Finds where a text's last tokens stood before, and what followed there.

#include "repeats.h"

// The most recent end of the longest earlier match of at least `shortest` tokens; -1 if there is none.
static int64_t find(const int32_t* text, int64_t length, int64_t shortest, int64_t longest) {
    int64_t found = -1;
    for_each_repeat(text, length, shortest, longest, [&](int64_t place, int64_t count) {
        found = place;
        return count + 1;
    });
    return found;
}

// For each of `batch` texts the counts[i] tokens that follow the match go to drafts[i * stride ..]; found[i]
// says how many there are: none without a match.
extern "C" void tandem_ngram(const int32_t* const* texts, const int64_t* lengths, const int64_t* counts,
                             int64_t batch, int64_t shortest, int64_t longest, int32_t* drafts, int64_t stride,
                             int64_t* found) {
    for (int64_t i = 0; i < batch; i++) {
        const int32_t* text = texts[i];
        int32_t* draft = drafts + i * stride;
        const int64_t place = find(text, lengths[i], shortest, longest);
        found[i] = place < 0 ? 0 : counts[i];
        for (int64_t k = 0; k < found[i]; k++) {
            const int64_t next = place + 1 + k, beyond = next - lengths[i];
            draft[k] = beyond < 0 ? text[next] : draft[beyond];
        }
    }
}
