//! Text from a model with part of its experts in memory.
//!
//! ```sh
//! cargo run --release -p hobbit --example generate -- models/demo.gguf 25% "In the beginning God created the"
//! ```
//!
//! The second argument is the memory for experts: `auto`, a size, or percent of all of them.

use std::error::Error;
use std::io::{Write, stdout};
use std::path::Path;

use hobbit::{ChatMessage, LogLevel, Model, ModelOptions, Sampler, SamplingOptions, SessionOptions, set_log};

/// Maximum number of generated tokens.
const N_PREDICT: usize = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, experts, prompt] = &arguments[..] else {
        return Err("usage: generate MODEL.gguf auto|SIZE|PERCENT% PROMPT".into());
    };
    set_log(|level, text| {
        if level == LogLevel::Error {
            eprint!("{text}");
        }
    });

    let options = ModelOptions { expert_cache: experts.parse()?, ..ModelOptions::default() };
    let model = Model::open(Path::new(path), &options)?;
    let info = model.info();
    eprintln!("{}: {} experts a layer, {} used by a token", info.description, info.n_expert, info.n_expert_used);

    // A model with a chat template gets a message; any other continues the text.
    let text = match info.chat_template {
        Some(_) => model.render_chat(&[ChatMessage::new("user", prompt)])?,
        None => prompt.clone(),
    };
    let mut session = model.session(&SessionOptions::default())?;
    session.feed(&model.tokenize(&text, true, true)?)?;
    let mut sampler = Sampler::new(&model, &SamplingOptions::default())?;
    let mut generation = session.generate_text(&mut sampler, Some(N_PREDICT));
    for text in generation.by_ref() {
        print!("{}", text?);
        stdout().flush()?;
    }
    println!();
    eprintln!("ended: {:?}", generation.stop_reason());

    let decode = session.stats().decode;
    let rate = decode.hit_rate().map_or("no experts".to_owned(), |rate| format!("{:.0} % hits", 100.0 * rate));
    eprintln!(
        "{rate}, {} MiB read, {:.1} tokens/s",
        decode.bytes_read >> 20,
        decode.tokens_per_second().unwrap_or(0.0)
    );
    Ok(())
}
