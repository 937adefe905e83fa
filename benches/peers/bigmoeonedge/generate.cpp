// One prompt, greedily, through BigMoeOnEdge's library, as bmoe-cli --moe-stream does it.
//
// Flags beside an adapter's: --name NAME; --cache-mb N, MiB of its cache, 0 for none; --substitute L, how much experts in the cache
// are preferred, where this version can, or else --drop F, the share of the mean weight below which missing experts are left out.

#include <algorithm>
#include <sstream>
#include <type_traits>

#include "bmoe/session.h"
#include "bmoe/version.h"
#include "peer.hpp"

namespace {

// Threads that read.
constexpr int IO_THREADS = 4;
// Tokens of a prompt that are computed at once, as elsewhere.
constexpr int UBATCH_MAX = 512;

// Prefers experts that are in the cache, where this version of the tool has such a setting.
template <typename Config, typename = void> struct Substitute {
    static constexpr bool is_there = false;
    static void set(Config &, float) {}
};

template <typename Config> struct Substitute<Config, std::void_t<decltype(Config::substitute_lambda)>> {
    static constexpr bool is_there = true;
    static void set(Config & config, float lambda) { config.substitute_lambda = lambda; }
};

void run(int argc, char ** argv) {
    std::string name = "bigmoeonedge";
    int cache_mb = 0;
    float substitute = 0, drop = 0;
    const peer::Task task = peer::task(argc, argv, [&](const std::string & flag, const std::string & value) {
        if (flag == "--name") {
            name = value;
        } else if (flag == "--cache-mb") {
            cache_mb = std::stoi(value);
        } else if (flag == "--substitute") {
            substitute = std::stof(value);
        } else if (flag == "--drop") {
            drop = std::stof(value);
        } else {
            return false;
        }
        return true;
    });
    const int64_t begun = peer::now_ns();
    bmoe::SessionConfig config;
    config.model_path = task.model;
    config.n_threads = task.threads;
    // Before the prompt's tokens are counted: a token stands for at least a byte.
    config.n_ctx = task.context > 0 ? task.context : int(task.prompt.size()) + task.predict + 16;
    config.n_batch = config.n_ctx;
    config.n_ubatch = std::min(config.n_ctx, UBATCH_MAX);
    config.moe.enabled = true;
    config.moe.io_threads = IO_THREADS;
    config.moe.cache_mb = cache_mb;
    config.moe.force_cache = true;
    std::ostringstream words;
    words << "-t " << task.threads << " --moe-stream --cache-mb " << cache_mb << " --force-cache --io-threads " << IO_THREADS;
    words << " --ubatch " << config.n_ubatch;
#ifdef BMOE_HAVE_EXPERT_READY_HOOK
    config.moe.overlap = true;
    words << " --overlap";
#endif
    using Moe = decltype(config.moe);
    if (cache_mb > 0 && substitute > 0 && Substitute<Moe>::is_there) {
        Substitute<Moe>::set(config.moe, substitute);
        words << " --expert-substitute " << substitute;
    } else if (cache_mb > 0 && drop > 0) {
        config.moe.drop_cold_frac = drop;
        words << " --drop-cold-experts " << drop;
    } else if (substitute > 0 || drop > 0) {
        throw std::runtime_error("no cache, and so nothing to prefer");
    }
    std::string error;
    const std::unique_ptr<bmoe::Session> session = bmoe::Session::open(config, error);
    if (!session) {
        throw std::runtime_error(error);
    }
    peer::Result result;
    result.load_ns = peer::now_ns() - begun;

    bmoe::GenerateRequest request;
    request.prompt = task.prompt;
    request.n_predict = task.predict;
    request.render_text = false;
    std::vector<int64_t> evaluations;
    const auto on_token = [&](const bmoe::TokenMetrics & token) {
        evaluations.push_back(int64_t((token.wall_ms + token.loop_overhead_ms) * 1e6));
    };
    const bmoe::RunResult ran = session->generate(request, on_token);
    if (!ran) {
        throw std::runtime_error(ran.error);
    }
    if (int(evaluations.size()) != task.predict) {
        std::ostringstream message;
        message << "the text ended after " << evaluations.size() << " of " << task.predict << " tokens";
        throw std::runtime_error(message.str());
    }
    // It evaluates the last token, too.
    evaluations.pop_back();
    result.token_ns = evaluations;
    result.engine = name;
    result.version = std::string(bmoe::version()) + " " + PEER_VERSION;
    result.command = words.str();
    result.text = ran.generated_text;
    result.prompt_tokens = ran.summary.n_prompt;
    result.prompt_ns = int64_t(ran.summary.prefill_seconds * 1e9);
    std::ostringstream told;
    told << name << ": " << ran.summary.moe_read_mib / ran.summary.n_generated << " MiB read a token, ";
    told << ran.summary.cache_hit_pct << " % hits";
    fprintf(stderr, "%s\n", told.str().c_str());
    peer::print(result);
}

}  // namespace

int main(int argc, char ** argv) {
    return peer::guarded("bigmoeonedge", [&] { run(argc, argv); });
}
