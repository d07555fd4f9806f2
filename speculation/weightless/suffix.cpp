// Suffix decoding: drafts the tokens that most often followed earlier occurrences of a text's last tokens, in the
// text itself and in a corpus of earlier outputs.
//
// A suffix tree stores how often each path occurs. Here each search counts the occurrences, at most RECENT of them:
// no tree is built, and text takes little memory. A text is searched again at each step. The corpus has hash chains
// of four orders: of places where the same last 1, 2, 4 or 8 symbols end, each with a link to the place before it. A
// longer match is found in the chain of the greatest order that is not longer.

#include "repeats.h"

#include <cstring>
#include <vector>

namespace {

constexpr int NUM_ORDERS = 4, ORDERS[NUM_ORDERS] = {1, 2, 4, 8};
constexpr int RECENT = 64;
constexpr int32_t NOTHING = -1;

struct Settings {
    int64_t depth;  // of the tree: the most tokens matched and drafted
    double max_spec_factor, min_token_prob;
};

// A ring buffer of outputs, each ended by NOTHING. A symbol is a tenant's number and a token, so that no tenant's
// text matches another's. Places are never reset; they count modulo 2^32.
struct Corpus {
    const int64_t* symbols;            // [capacity]
    uint32_t (*previous)[NUM_ORDERS];  // [capacity]: the place before in each order's chain
    uint32_t (*heads)[NUM_ORDERS];     // [capacity]: by hash, each chain's most recent place
    uint32_t mask;                     // capacity - 1, capacity a power of two
    uint32_t oldest, end;              // places [oldest, end) hold outputs

    int64_t symbol(uint32_t place) const { return symbols[place & mask]; }
    int32_t after(uint32_t place) const { return int32_t(symbol(place + 1)); }
    bool is_predicted(uint32_t) const { return false; }
};

// The first `predicted` tokens are the client's prediction of the answer.
struct Text {
    const int32_t* tokens;
    int64_t length, predicted;

    int32_t after(uint32_t place) const { return place + 1 < length ? tokens[place + 1] : NOTHING; }
    bool is_predicted(uint32_t place) const { return place < predicted; }
};

// Earlier occurrences of the text's last tokens, the most recent first, and the number of tokens that match at each.
struct Places {
    int count = 0;
    uint32_t at[RECENT];
    int64_t matched[RECENT];

    bool full() const { return count == RECENT; }
    void add(uint32_t place, int64_t length) {
        at[count] = place;
        matched[count++] = length;
    }
};

struct Draft {
    int32_t* tokens;
    int64_t length = 0, predicted = 0;  // the first `predicted` tokens are adjacent in the prediction
    double score = 0;                   // the expected number of accepted tokens
};

uint64_t mix(uint64_t hash, int64_t symbol) {
    hash = (hash + uint64_t(symbol)) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 32;
}

// Follows the most frequent next token at each branch. A path's probability is the share of the places that are still
// on it.
template <class Source>
void walk(const Source& source, uint32_t* places, int count, int64_t limit, double min_prob, int32_t* path,
          Draft& best) {
    int64_t length = 0, sum = 0, predicted = 0;
    for (int alive = count; length < limit;) {
        int32_t next[RECENT], token = NOTHING;
        for (int i = 0; i < alive; i++) next[i] = source.after(places[i]);
        int most = 0;
        for (int i = 0; i < alive - most; i++) {
            const int same = next[i] == NOTHING ? 0 : int(std::count(next + i, next + alive, next[i]));
            if (same > most) {
                most = same;
                token = next[i];
            }
        }
        if (most == 0 || double(most) / count < min_prob) break;
        int kept = 0;
        for (int i = 0; i < alive; i++)
            if (next[i] == token) places[kept++] = places[i] + 1;
        alive = kept;
        sum += most;
        path[length++] = token;
        if (source.is_predicted(places[alive - 1])) predicted = length;  // the last place is the earliest
    }
    const double score = double(sum) / count;
    if (score > best.score) {
        std::memcpy(best.tokens, path, length * sizeof(int32_t));
        best.length = length;
        best.predicted = predicted;
        best.score = score;
    }
}

// Tries each match length of an order, the longest first.
template <class Source>
void try_order(const Source& source, const Places& places, int order, int64_t count, const Settings& settings,
               int32_t* path, Draft& best) {
    const int64_t beyond = order + 1 < NUM_ORDERS ? ORDERS[order + 1] : settings.depth;
    for (int64_t length = std::min(beyond, settings.depth) - 1; length >= ORDERS[order]; length--) {
        const double allowed = std::min(double(count), double(length) * settings.max_spec_factor);
        const int64_t limit = std::min(int64_t(allowed), settings.depth - length);
        if (double(limit) <= best.score) continue;
        uint32_t matching[RECENT];
        int found = 0;
        for (int i = 0; i < places.count; i++)
            if (places.matched[i] >= length) matching[found++] = places.at[i];
        if (found) walk(source, matching, found, limit, settings.min_token_prob, path, best);
    }
}

void search_text(const Text& text, int64_t count, const Settings& settings, int32_t* path, Draft& best) {
    Places places[NUM_ORDERS];
    const int64_t longest = settings.depth - 1;
    for_each_repeat(text.tokens, text.length, 1, longest, [&](int64_t place, int64_t length) {
        int64_t wanted = settings.depth;
        for (int order = NUM_ORDERS - 1; order >= 0; order--) {
            if (ORDERS[order] <= length && !places[order].full()) places[order].add(uint32_t(place), length);
            if (!places[order].full()) wanted = ORDERS[order];
        }
        return wanted;
    });
    for (int order = NUM_ORDERS - 1; order >= 0; order--)
        try_order(text, places[order], order, count, settings, path, best);
}

// The places in the chain of one order. Each is checked: hashes may collide, and places may be overwritten.
Places follow_chain(const Corpus& corpus, const int64_t* last, int64_t known, int order, int64_t longest) {
    Places places;
    if (known < ORDERS[order] || longest < ORDERS[order]) return places;
    uint64_t hash = 0;
    for (int i = 0; i < ORDERS[order]; i++) hash = mix(hash, last[i]);
    uint32_t place = corpus.heads[hash & corpus.mask][order];
    const uint32_t live = corpus.end - corpus.oldest;
    uint32_t age = corpus.end - place;
    for (uint32_t before = 0; before < age && age <= live && !places.full(); age = corpus.end - place) {
        const int64_t most = std::min({longest, known, int64_t(live - age) + 1});
        int64_t length = 0;
        while (length < most && corpus.symbol(place - uint32_t(length)) == last[length]) length++;
        if (length >= ORDERS[order]) places.add(place, length);
        before = age;
        place = corpus.previous[place & corpus.mask][order];
    }
    return places;
}

void search_corpus(const Corpus& corpus, const Text& text, int64_t tenant, int64_t count, const Settings& settings,
                   int32_t* path, Draft& best) {
    const int64_t longest = settings.depth - 1, known = std::min(longest, text.length);
    std::vector<int64_t> last(known);  // the last symbol first
    for (int64_t i = 0; i < known; i++) last[i] = tenant << 32 | text.tokens[text.length - 1 - i];
    for (int order = NUM_ORDERS - 1; order >= 0; order--) {
        const Places places = follow_chain(corpus, last.data(), known, order, longest);
        try_order(corpus, places, order, count, settings, path, best);
    }
}

}  // namespace

// Adds an output, `count` symbols from `start` on, to the chains.
extern "C" void tandem_suffix_enter(const Corpus* corpus, uint32_t start, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const uint32_t place = start + uint32_t(i);
        uint64_t hash = 0;
        for (int64_t k = 0, order = 0; k <= i && order < NUM_ORDERS; k++) {
            hash = mix(hash, corpus->symbol(place - uint32_t(k)));
            if (k + 1 < ORDERS[order]) continue;
            uint32_t& head = corpus->heads[hash & corpus->mask][order];
            corpus->previous[place & corpus->mask][order] = head;
            head = place;
            order++;
        }
    }
}

// Text i begins with predicted[i] tokens of its request's prediction; then predicted[i] is set to the number of draft
// tokens from there. The corpus is searched for the texts whose tenants[i] is not negative.
extern "C" void tandem_suffix_search(const Batch* batch, const Settings* settings, const Corpus* corpus,
                                     const int64_t* tenants, int64_t* predicted) {
    std::vector<int32_t> path(batch->stride);
    for (int64_t i = 0; i < batch->size; i++) {
        const Text text{batch->texts[i], batch->lengths[i], predicted[i]};
        const int64_t count = batch->counts[i];
        Draft best{batch->drafts + i * batch->stride};
        search_text(text, count, *settings, path.data(), best);
        if (tenants[i] >= 0) search_corpus(*corpus, text, tenants[i], count, *settings, path.data(), best);
        batch->found[i] = best.length;
        predicted[i] = best.predicted;
    }
}
