// node-llama-cpp: llama.cpp in Node, with its prebuilt binary for the CPU. `run` sets PEER_HOME and PEER_THREADS.

import {readFileSync} from "node:fs";
import {pathToFileURL} from "node:url";
import {parseArgs} from "node:util";

const {values: args} = parseArgs({
    options: {
        model: {type: "string"},
        "prompt-file": {type: "string"},
        predict: {type: "string"},
        threads: {type: "string"},
        context: {type: "string"}
    }
});
const now = () => process.hrtime.bigint();

async function main() {
    const text = readFileSync(args["prompt-file"], "utf8");
    const predict = Number(args.predict);
    const threads = Number(process.env.PEER_THREADS);

    const begun = now();
    const home = `${process.env.PEER_HOME}/node_modules/node-llama-cpp`;
    const about = JSON.parse(readFileSync(`${home}/package.json`, "utf8"));
    const {getLlama, TokenBias} = await import(pathToFileURL(`${home}/dist/index.js`));
    const llama = await getLlama({
        gpu: false,
        build: "never",
        skipDownload: true,
        logLevel: "error",
        maxThreads: threads
    });
    const model = await llama.loadModel({modelPath: args.model, gpuLayers: 0, useMmap: true});
    const prompt = model.tokenize(text, false);
    if (model.tokens.shouldPrependBosToken && model.tokens.bos != null)
        prompt.unshift(model.tokens.bos);
    const context = await model.createContext({
        contextSize: args.context ? Number(args.context) : prompt.length + predict + 8,
        batchSize: 512,
        threads,
        sequences: 1
    });
    const sequence = context.getSequence();
    const loaded = now();

    // The first token comes out of the prompt's evaluation; the last one is never evaluated.
    const bias = new TokenBias(model.tokenizer);
    if (model.tokens.eos != null)
        bias.set(model.tokens.eos, "never");
    const tokens = [];
    const arrivals = [];
    for await (const token of sequence.evaluate(prompt, {temperature: 0, tokenBias: bias, yieldEogToken: true})) {
        arrivals.push(now());
        tokens.push(token);
        if (tokens.length === predict)
            break;
    }
    if (tokens.length !== predict)
        throw new Error(`${tokens.length} tokens generated, expected ${predict}`);

    const gaps = arrivals.slice(1).map((at, i) => Number(at - arrivals[i]));
    console.log(JSON.stringify({
        engine: "node-llama-cpp",
        version: `${about.version} (llama.cpp ${llama.llamaCppRelease.release})`,
        command: `threads=${threads} useMmap=true batchSize=512 gpu=false`,
        load_ns: Number(loaded - begun),
        prompt_tokens: prompt.length,
        prompt_ns: Number(arrivals[0] - loaded),
        decode_tokens: gaps.length,
        decode_ns: Number(arrivals.at(-1) - arrivals[0]),
        token_ns: gaps,
        tokens,
        text: model.detokenize(tokens)
    }));
}

main().then(() => process.exit(0), (error) => {
    console.error(`node-llama-cpp: ${error?.message ?? error}`);
    process.exit(1);
});
