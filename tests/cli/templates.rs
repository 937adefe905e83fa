//! Models whose chat templates do harm.

use crate::fixture::cli::cli;
use crate::fixture::templates::{ALONE, hostile_model};

#[test]
fn a_hostile_template_of_a_model_is_refused_or_replaced() {
    for name in ALONE {
        let (_dir, model) = hostile_model(name);
        let talk = ["-m", model.to_str().unwrap(), "-p", "Hi", "-st", "-n", "1", "-t", "1", "-c", "64"];
        let part = "qwen3moe.gguf: the model's chat template cannot be used; --chat-template chatml";
        cli(&talk).run().expect(1).says(&[part]);
        cli(&[&talk[..], &["--chat-template", "chatml"]].concat()).run().expect(0);
    }
}
