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

// Unpacks a PNG's pixels into memory of the size that its header implies: stb_image lets them grow to gigabytes.
void check_png(const unsigned char * bytes, size_t len, uint64_t width, uint64_t height) {
    if (len < 33 || memcmp(bytes + 12, "IHDR", 4) != 0) {
        throw std::runtime_error("a PNG without its header");
    }
    const int depth = bytes[24], colour = bytes[25], interlaced = bytes[28];
    const uint64_t channels = colour == 2 ? 3 : colour == 4 ? 2 : colour == 6 ? 4 : 1;
    const uint64_t rows = interlaced ? 2 * height + 8 : height;
    const uint64_t row  = 2 + (width * channels * depth + 7) / 8;
    const uint64_t most = interlaced ? 2 * rows * row : rows * row;
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
    if (most > INT_MAX || packed.size() > INT_MAX) {
        throw std::runtime_error("a PNG that is too large");
    }
    std::vector<char> raw(most);
    if (stbi_zlib_decode_buffer(raw.data(), int(raw.size()), packed.data(), int(packed.size())) < 0) {
        throw std::runtime_error("a PNG whose pixels cannot be unpacked");
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

mtmd_bitmap * hobbit_media_image(const unsigned char * bytes, size_t len, uint64_t pixels_max, char * error,
                                 size_t error_capacity) {
    return guarded<mtmd_bitmap *>(error, error_capacity, nullptr, [&] {
        int x = 0, y = 0, channels = 0;
        if (len > INT_MAX || !stbi_info_from_memory(bytes, int(len), &x, &y, &channels) || x <= 0 || y <= 0) {
            throw std::runtime_error("no PNG, JPEG, GIF or BMP image, or a damaged one");
        }
        if (uint64_t(x) * uint64_t(y) > pixels_max) {
            throw std::runtime_error(std::to_string(x) + " x " + std::to_string(y) + " pixels, and at most " +
                                     std::to_string(pixels_max) + " are read");
        }
        if (len > 8 && memcmp(bytes, "\x89PNG", 4) == 0) {
            check_png(bytes, len, x, y);
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

mtmd_bitmap * hobbit_media_audio(const mtmd_context * ctx, const unsigned char * bytes, size_t len, double seconds_max,
                                 char * error, size_t error_capacity) {
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
        std::vector<float> samples(n);
        if (ma_decoder_read_pcm_frames(decoder.get(), samples.data(), n, &n_read) != MA_SUCCESS) {
            throw std::runtime_error("damaged sound");
        }
        return mtmd_bitmap_init_from_audio(samples.size(), samples.data());
    });
}

mtmd_input_chunks * hobbit_media_chunks(const mtmd_context * ctx, const mtmd_bitmap * bitmap, char * error,
                                        size_t error_capacity) {
    return guarded<mtmd_input_chunks *>(error, error_capacity, nullptr, [&]() -> mtmd_input_chunks * {
        std::unique_ptr<mtmd_input_chunks, void (*)(mtmd_input_chunks *)> chunks(mtmd_input_chunks_init(),
                                                                                 mtmd_input_chunks_free);
        const mtmd_input_part part = { nullptr, bitmap };
        const mtmd_input_part * parts[] = { &part };
        return mtmd_tokenize_from_parts(ctx, chunks.get(), parts, 1, false) == 0 ? chunks.release() : nullptr;
    });
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
