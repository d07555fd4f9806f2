// Finds an earlier occurrence of a text's last tokens, and drafts the tokens that followed it.

#include "repeats.h"

// The most recent end of the longest earlier match of at least `shortest` tokens; -1 without a match.
static int64_t find(const int32_t* text, int64_t length, int64_t shortest, int64_t longest) {
    int64_t found = -1;
    for_each_repeat(text, length, shortest, longest, [&](int64_t place, int64_t count) {
        found = place;
        return count + 1;
    });
    return found;
}

// Drafts the tokens after the match; none without a match.
extern "C" void tandem_ngram(const Batch* batch, int64_t shortest, int64_t longest) {
    for (int64_t i = 0; i < batch->size; i++) {
        const int32_t* text = batch->texts[i];
        int32_t* draft = batch->drafts + i * batch->stride;
        const int64_t length = batch->lengths[i], place = find(text, length, shortest, longest);
        batch->found[i] = place < 0 ? 0 : batch->counts[i];
        for (int64_t k = 0; k < batch->found[i]; k++) {
            const int64_t next = place + 1 + k, beyond = next - length;
            draft[k] = beyond < 0 ? text[next] : draft[beyond];
        }
    }
}
