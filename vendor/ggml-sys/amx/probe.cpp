// Compiled, never run: what does the compiler do with stores into a tile configuration?
//
// GCC 12 declares 8 of the 64 bytes that _tile_loadconfig reads, so everything that ggml stores behind them (rows and
// row lengths of the tiles) is dropped as dead, and the first tile instruction faults. Whether a compiler does so is
// seen in what it makes of this file: the mark is in the object, or it is not.

#if defined(HOBBIT_AMX_WANTED)

#if !defined(__AMX_INT8__)
#error "these flags do not ask for AMX"
#endif

#else

#include <immintrin.h>

struct tile_config {
    unsigned char palette_id;
    unsigned char start_row;
    unsigned char reserved[14];
    unsigned int  colsb[8];
    unsigned int  rows[4];
};

static_assert(sizeof(tile_config) == 64, "as ldtilecfg reads it");

void reads_all_of(const void * config);

void configure() {
    alignas(64) tile_config config = {};
    config.palette_id = 1;
    config.colsb[5]   = 0x5a5b5c5d; // the mark
#if defined(HOBBIT_AMX_CONTROL)
    // Somebody else may read everything: here the mark has to be found, or else the search is no good.
    reads_all_of(&config);
#else
    _tile_loadconfig(&config);
#endif
}

#endif
