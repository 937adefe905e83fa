// As in ggml-cpu/amx: nothing where the compiler was not asked for AMX. (Old clangs spell it otherwise; ggml then has
// none.)
#if defined(__AMX_INT8__) || defined(__AMXINT8__)
#include <immintrin.h>
#include <cstdint>
struct config { uint8_t palette, row, reserved[14]; uint16_t colsb[16]; uint8_t rows[16]; };
void toy_amx_mul_mat() {
    alignas(64) config tc = {};
    tc.palette = 1;
    tc.rows[0] = 8;
    tc.colsb[0] = 64;
    _tile_loadconfig(&tc);
    _tile_zero(0);
}
#endif
