// llama.cpp's mtmd, which reads images and sound: exceptions and failed assertions turned into errors, sizes checked
// before memory is taken.

#include "guard.h"

#include "mtmd.h"

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

// As mtmd-helper.cpp compiles it, where it cannot be reached from outside: it trusts the length in a file's header.
#define MINIAUDIO_IMPLEMENTATION
#define MA_NO_ENCODING
#define MA_NO_DEVICE_IO
#define MA_NO_RESOURCE_MANAGER
#define MA_NO_NODE_GRAPH
#define MA_NO_ENGINE
#define MA_NO_GENERATION
#define MA_API static
// The only symbol that is not static.
#define ma_atomic_global_lock hobbit_ma_atomic_global_lock
#include "miniaudio/miniaudio.h"

// The decoder that mtmd-helper.cpp compiles. Its own entry point hands bytes that are no image to ffmpeg.
extern "C" {
int             stbi_info_from_memory(const unsigned char * bytes, int len, int * x, int * y, int * channels);
unsigned char * stbi_load_from_memory(const unsigned char * bytes, int len, int * x, int * y, int * channels,
                                      int wanted);
int             stbi_zlib_decode_buffer(char * out, int out_len, const char * in, int in_len);
const char *    stbi_failure_reason(void);
void            stbi_image_free(void * pixels);
}

namespace {

uint32_t big_endian(const unsigned char * at) {
    return uint32_t(at[0]) << 24 | uint32_t(at[1]) << 16 | uint32_t(at[2]) << 8 | at[3];
}

struct png_layout {
    uint64_t channels, depth;
    bool     interlaced;
    // Bytes of the unpacked rows, each with its filter.
    uint64_t unpacked;
};

// By the header, which need not hold what it claims.
png_layout layout_of(const unsigned char * bytes, size_t len, uint64_t width, uint64_t height) {
    if (len < 33 || memcmp(bytes + 12, "IHDR", 4) != 0) {
        throw std::runtime_error("a PNG without its header");
    }
    const int colour = bytes[25];
    png_layout own = { colour == 2 ? 3u : colour == 4 ? 2u : colour == 6 ? 4u : 1u, bytes[24], bytes[28] != 0, 0 };
    // First column and row, and steps, of the passes of an interlaced image.
    const uint64_t passes[7][4] = { { 0, 0, 8, 8 }, { 4, 0, 8, 8 }, { 0, 4, 4, 8 }, { 2, 0, 4, 4 },
                                    { 0, 2, 2, 4 }, { 1, 0, 2, 2 }, { 0, 1, 1, 2 } };
    for (int pass = 0; pass < (own.interlaced ? 7 : 1); ++pass) {
        const auto [x, y, dx, dy] = passes[pass];
        const uint64_t w = own.interlaced ? (width  - std::min(width,  x) + dx - 1) / dx : width;
        const uint64_t h = own.interlaced ? (height - std::min(height, y) + dy - 1) / dy : height;
        own.unpacked += h * (2 + (w * own.channels * own.depth + 7) / 8);
    }
    return own;
}

// Unpacks a PNG's pixels into memory of the size that its header implies: stb_image lets them grow to gigabytes.
void check_png(const unsigned char * bytes, size_t len, const png_layout & layout) {
    std::vector<char> packed;
    for (size_t at = 8; at + 12 <= len;) {
        const size_t n = big_endian(bytes + at);
        if (n > len - at - 12) {
            throw std::runtime_error("a PNG that is cut off");
        }
        if (memcmp(bytes + at + 4, "IDAT", 4) == 0) {
            packed.insert(packed.end(), bytes + at + 8, bytes + at + 8 + n);
        }
        at += 12 + n;
    }
    if (layout.unpacked > INT_MAX || packed.size() > INT_MAX) {
        throw std::runtime_error("a PNG that is too large");
    }
    std::vector<char> raw(layout.unpacked);
    if (stbi_zlib_decode_buffer(raw.data(), int(raw.size()), packed.data(), int(packed.size())) < 0) {
        throw std::runtime_error("a PNG whose pixels cannot be unpacked");
    }
}

// Bytes that stb_image takes at once for a PNG: unpacked rows, pixels and a pass of an interlaced image; then pixels
// with all channels, of 16 and of 8 bits.
uint64_t png_bytes(size_t len, uint64_t pixels, const png_layout & png) {
    const uint64_t wide = png.depth == 16 ? 2 : 1;
    const uint64_t own  = pixels * png.channels * wide;
    const uint64_t all  = pixels * 3 * wide;
    // Packed data are gathered in memory that doubles.
    return 2 * len + std::max({ png.unpacked + own + (png.interlaced ? own / 2 : 0), own + all, all + pixels * 3 });
}

// The same for other formats. A JPEG, with its coefficients, is of whole blocks; GIF takes 12 for a pixel, HDR 15.
uint64_t other_bytes(uint64_t width, uint64_t height) {
    const uint64_t blocks = ((width + 31) / 32 * 32) * ((height + 31) / 32 * 32);
    return blocks * 4 * 3 + width * height * 3;
}

// Numbers of an image's or a sound's parts in a chunk, by the form in which mtmd saves it.
struct parts {
    bool     is_audio = false;
    uint64_t values = 0, width = 0;
};

parts parts_of(const mtmd_input_chunk * chunk) {
    size_t n = 0;
    if (mtmd_input_chunk_save(chunk, nullptr, 0, &n) != 0) {
        throw std::runtime_error("mtmd does not save a chunk");
    }
    std::vector<char> saved(n);
    if (mtmd_input_chunk_save(chunk, saved.data(), n, &n) != 0) {
        throw std::runtime_error("mtmd does not save a chunk");
    }
    size_t at = 0;
    const auto skip = [&](size_t bytes) {
        if (bytes > saved.size() - at) {
            throw std::runtime_error("mtmd saves chunks in an unknown form");
        }
        at += bytes;
        return saved.data() + at - bytes;
    };
    const auto read = [&](auto value) {
        memcpy(&value, skip(sizeof(value)), sizeof(value));
        return value;
    };
    if (read(uint64_t()) != 2) {
        throw std::runtime_error("mtmd saves chunks in an unknown form");
    }
    read(uint32_t());                     // kind
    skip(read(uint64_t()) * 4);           // tokens
    parts all;
    for (const bool is_audio : { false, true }) {
        if (read(uint8_t()) == 0) {
            continue;
        }
        all.is_audio = is_audio;
        skip(is_audio ? 4 : 5 * 4);       // numbers of tokens, and of positions
        skip(read(uint64_t()));           // id
        read(uint8_t());                  // is_audio
        for (uint64_t left = read(uint64_t()); left > 0; --left) {
            skip(2 + 4);                  // marks, padding
            const auto width = read(int32_t()), height = read(int32_t());
            all.values += uint64_t(std::max(width, 0)) * uint64_t(std::max(height, 0)) * (is_audio ? 1 : 3);
            all.width  += uint64_t(std::max(width, 0));
        }
    }
    return all;
}

using chunks_ptr = std::unique_ptr<mtmd_input_chunks, void (*)(mtmd_input_chunks *)>;
using bitmap_ptr = std::unique_ptr<mtmd_bitmap, void (*)(mtmd_bitmap *)>;

chunks_ptr chunks_of(const mtmd_context * ctx, const mtmd_bitmap * bitmap) {
    chunks_ptr chunks(mtmd_input_chunks_init(), mtmd_input_chunks_free);
    const mtmd_input_part part = { nullptr, bitmap };
    const mtmd_input_part * parts[] = { &part };
    if (mtmd_tokenize_from_parts(ctx, chunks.get(), parts, 1, false) != 0) {
        chunks.reset();
    }
    return chunks;
}

// Bytes that mtmd takes at once to divide an image of this size, by an image without pixels: it and its copy; rows that
// have their new width and not yet their new height; twice the pixels of the parts, and four times their numbers.
uint64_t dividing_bytes(const mtmd_context * ctx, uint64_t width, uint64_t height) {
    const bitmap_ptr bitmap(mtmd_bitmap_init(uint32_t(width), uint32_t(height), nullptr), mtmd_bitmap_free);
    const auto chunks = chunks_of(ctx, bitmap.get());
    if (!chunks) {
        throw std::runtime_error("");
    }
    parts all;
    for (size_t at = 0; at < mtmd_input_chunks_size(chunks.get()); ++at) {
        const auto own = parts_of(mtmd_input_chunks_get(chunks.get(), at));
        all.values += own.values;
        all.width  += own.width;
    }
    // Step3-VL makes a square of a thin image.
    const uint64_t longer = std::max(width, height), square = std::min(width, height) < 32 ? longer * longer : 0;
    return (2 * width * height + all.width * height + square) * 3 + all.values * (2 + 2 * sizeof(float));
}

void take(const hobbit_media_room & room, uint64_t bytes) {
    if (!room.take(room.taker, bytes)) {
        throw std::runtime_error("reading it takes " + std::to_string((bytes >> 20) + 1) +
                                 " MiB, which the memory budget cannot spare: send a smaller one, or give a larger "
                                 "--mem-budget");
    }
}

// Scans of a progressive JPEG. Encoders write about ten.
const int SCANS_MAX = 100;

// Refuses a JPEG of more scans than an encoder writes: stb_image passes over all blocks of the image for each. Finds
// segments where stb_image does, which stops at what is no segment.
void check_jpeg(const unsigned char * bytes, size_t len) {
    // If not progressive, each component may have one.
    int n_left = 4;
    for (size_t at = 0; len - at >= 4;) {
        const int marker = bytes[at] == 0xff ? bytes[at + 1] : 0;
        // Entropy-coded data, where a zero follows each 0xff, and 0xff that fill up before a marker.
        if (marker == 0 || marker == 0xff) {
            ++at;
            continue;
        }
        if (marker == 0xd9) {
            return; // the end: other files may follow
        }
        at += 2;
        if (marker == 0xd8 || (marker >= 0xd0 && marker <= 0xd7)) {
            continue; // the beginning, and restarts: without a length
        }
        if (marker == 0xc2) {
            n_left = SCANS_MAX;
        }
        if (marker == 0xda && --n_left < 0) {
            throw std::runtime_error("a JPEG of too many scans");
        }
        at += std::min(len - at, size_t(bytes[at]) << 8 | bytes[at + 1]);
    }
}

// Called for each node before it is computed. "No" keeps the nodes of a split together.
bool on_node(ggml_tensor * node, bool asks, void * data) {
    if (!asks) {
        return true;
    }
    // The size of a graph's buffer is known before its pages are touched.
    auto * memory = static_cast<hobbit_media_memory *>(data);
    const auto * buffer = node->view_src != nullptr ? node->view_src->buffer : node->buffer;
    if (memory != nullptr && buffer != nullptr &&
        ggml_backend_buffer_get_usage(const_cast<ggml_backend_buffer *>(buffer)) != GGML_BACKEND_BUFFER_USAGE_WEIGHTS) {
        const uint64_t n = ggml_backend_buffer_get_size(const_cast<ggml_backend_buffer *>(buffer));
        if (n > memory->seen && !memory->lend(memory->lender, n)) {
            throw std::runtime_error("its buffers of " + std::to_string(n >> 20) +
                                     " MiB do not fit the memory budget; see --image-max-tokens and --mem-budget");
        }
        memory->seen = std::max(memory->seen, n);
    }
    hobbit_computing();
    return false;
}

mtmd_context_params params_of(int n_threads, int image_min_tokens, int image_max_tokens) {
    mtmd_context_params params = mtmd_context_params_default();
    params.use_gpu          = false;
    params.print_timings    = false;
    params.n_threads        = n_threads;
    params.warmup           = false;
    params.image_min_tokens = image_min_tokens;
    params.image_max_tokens = image_max_tokens;
    params.cb_eval          = on_node;
    return params;
}

} // namespace

extern "C" {

bool hobbit_media_needs(const char * path, int image_min_tokens, int image_max_tokens, uint64_t * weights,
                        uint64_t * compute, int32_t * max_tokens, bool * non_causal, char * error,
                        size_t error_capacity) {
    return guarded(error, error_capacity, false, [&] {
        uint64_t bytes[2] = { 0, 0 };
        for (const bool warmup : { false, true }) {
            auto params   = params_of(1, image_min_tokens, image_max_tokens);
            params.warmup = warmup;
            const auto usage = mtmd_get_memory_usage(path, params);
            if (usage.backend_mem_usage.empty()) {
                return false;
            }
            for (const auto & [device, n] : usage.backend_mem_usage) {
                bytes[warmup] += n;
            }
            *max_tokens = usage.image_max_tokens;
            *non_causal = usage.use_non_causal;
        }
        *weights = bytes[0];
        *compute = bytes[1] - bytes[0];
        return true;
    });
}

mtmd_context * hobbit_media_open(const char * path, const llama_model * model, int n_threads, int image_min_tokens,
                                 int image_max_tokens, hobbit_media_memory * memory, char * error,
                                 size_t error_capacity) {
    return guarded<mtmd_context *>(error, error_capacity, nullptr, [&] {
        auto params = params_of(n_threads, image_min_tokens, image_max_tokens);
        params.cb_eval_user_data = memory;
        return mtmd_init_from_file(path, model, params);
    });
}

mtmd_bitmap * hobbit_media_image(const mtmd_context * ctx, const unsigned char * bytes, size_t len,
                                 hobbit_image_limits limits, hobbit_media_room room, char * error,
                                 size_t error_capacity) {
    return guarded<mtmd_bitmap *>(error, error_capacity, nullptr, [&] {
        int x = 0, y = 0, channels = 0;
        if (len > INT_MAX || !stbi_info_from_memory(bytes, int(len), &x, &y, &channels) || x <= 0 || y <= 0) {
            throw std::runtime_error("no PNG, JPEG, GIF or BMP image, or a damaged one");
        }
        const uint64_t width = x, height = y, longer = std::max(width, height), shorter = std::min(width, height);
        if (width * height > limits.pixels || longer > limits.side || longer > shorter * limits.aspect) {
            throw std::runtime_error(std::to_string(x) + " x " + std::to_string(y) + " pixels, and at most " +
                                     std::to_string(limits.pixels) + " are read, at most " +
                                     std::to_string(limits.side) + " on a side, which is at most " +
                                     std::to_string(limits.aspect) + " times the other");
        }
        const bool is_png = len > 8 && memcmp(bytes, "\x89PNG", 4) == 0;
        const auto png = is_png ? layout_of(bytes, len, width, height) : png_layout();
        const uint64_t decoding = is_png ? png_bytes(len, width * height, png) : other_bytes(width, height);
        take(room, std::max(decoding, dividing_bytes(ctx, width, height)));
        if (is_png) {
            check_png(bytes, len, png);
        }
        if (bytes[0] == 0xff) {
            check_jpeg(bytes, len);
        }
        std::unique_ptr<unsigned char, void (*)(void *)> pixels(
            stbi_load_from_memory(bytes, int(len), &x, &y, &channels, 3), stbi_image_free);
        if (!pixels) {
            const char * reason = stbi_failure_reason();
            throw std::runtime_error(std::string("a damaged image: ") + (reason == nullptr ? "no reason" : reason));
        }
        return mtmd_bitmap_init(x, y, pixels.get());
    });
}

// Bytes for each sample: three copies, and at most 128 bands for each 160 samples, five times.
const uint64_t SAMPLE_BYTES = 3 * sizeof(float) + 5 * sizeof(float) * 128 / 160;

// Loudest sample. Integers of 16 bits that were stored as numbers are still sound; larger ones overflow when they are
// squared.
const float LOUDEST = 32768.0f;

mtmd_bitmap * hobbit_media_audio(const mtmd_context * ctx, const unsigned char * bytes, size_t len, double seconds_max,
                                 hobbit_media_room room, char * error, size_t error_capacity) {
    return guarded<mtmd_bitmap *>(error, error_capacity, nullptr, [&] {
        const int rate = mtmd_get_audio_sample_rate(ctx);
        if (rate <= 0) {
            throw std::runtime_error("sound, which this model's projector does not encode");
        }
        const ma_decoder_config config = ma_decoder_config_init(ma_format_f32, 1, ma_uint32(rate));
        ma_decoder own;
        if (ma_decoder_init_memory(bytes, len, &config, &own) != MA_SUCCESS) {
            throw std::runtime_error("no WAV, MP3 or FLAC sound, or a damaged one");
        }
        std::unique_ptr<ma_decoder, ma_result (*)(ma_decoder *)> decoder(&own, ma_decoder_uninit);
        ma_uint64 n = 0, n_read = 0;
        if (ma_decoder_get_length_in_pcm_frames(decoder.get(), &n) != MA_SUCCESS || n == 0) {
            throw std::runtime_error("sound of no length");
        }
        // As the header claims: memory for it is taken next.
        if (double(n) > seconds_max * rate) {
            throw std::runtime_error(std::to_string(n / rate) + " seconds of sound, and at most " +
                                     std::to_string(int(seconds_max)) + " are read");
        }
        take(room, n * SAMPLE_BYTES);
        std::vector<float> samples(n);
        if (ma_decoder_read_pcm_frames(decoder.get(), samples.data(), n, &n_read) != MA_SUCCESS) {
            throw std::runtime_error("damaged sound");
        }
        for (const float sample : samples) {
            if (!(sample >= -LOUDEST && sample <= LOUDEST)) {
                throw std::runtime_error("sound with a sample of " + std::to_string(sample) +
                                         ", and samples from -32768 to 32768 are read");
            }
        }
        return mtmd_bitmap_init_from_audio(samples.size(), samples.data());
    });
}

mtmd_input_chunks * hobbit_media_chunks(const mtmd_context * ctx, const mtmd_bitmap * bitmap, char * error,
                                        size_t error_capacity) {
    return guarded<mtmd_input_chunks *>(error, error_capacity, nullptr,
                                        [&] { return chunks_of(ctx, bitmap).release(); });
}

uint64_t hobbit_media_chunk_bytes(const mtmd_input_chunk * chunk) {
    return guarded<uint64_t>(nullptr, 0, 0, [&] { return parts_of(chunk).values * sizeof(float); });
}

bool hobbit_media_encode(mtmd_context * ctx, const mtmd_input_chunk * chunk, float * embeddings, size_t n, char * error,
                         size_t error_capacity) {
    return guarded(error, error_capacity, false, [&] {
        if (mtmd_encode_chunk(ctx, chunk) != 0) {
            return false;
        }
        memcpy(embeddings, mtmd_get_output_embd(ctx), n * sizeof(float));
        return true;
    });
}

bool hobbit_media_positions(const mtmd_context * ctx, const mtmd_input_chunk * chunk, llama_pos first,
                            llama_pos * positions, char * error, size_t error_capacity) {
    return guarded(error, error_capacity, false, [&] {
        const size_t n       = mtmd_input_chunk_get_n_tokens(chunk);
        const bool   is_flat = mtmd_input_chunk_get_type(chunk) != MTMD_INPUT_CHUNK_TYPE_IMAGE;
        const bool   is_wide = mtmd_decode_use_mrope(ctx);
        for (size_t i = 0; i < n; ++i) {
            if (!is_wide || is_flat) {
                for (size_t section = 0; section < (is_wide ? 4 : 1); ++section) {
                    positions[section * n + i] = first + llama_pos(i);
                }
                continue;
            }
            const auto at = mtmd_image_tokens_get_decoder_pos(mtmd_input_chunk_get_tokens_image(chunk), first, i);
            positions[i]         = llama_pos(at.t);
            positions[n + i]     = llama_pos(at.y);
            positions[2 * n + i] = llama_pos(at.x);
            positions[3 * n + i] = llama_pos(at.z);
        }
        return true;
    });
}

} // extern "C"
