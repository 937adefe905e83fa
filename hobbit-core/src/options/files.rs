//! Checks of the files that a run reads and writes.

use std::path::Path;

use super::{LowSource, ModelOptions};
use crate::files::{self, Input, Kind, Output, OutputError};
use crate::gguf::shards_by_name;

impl ModelOptions {
    /// Checks that a run of `model` with these options overwrites no other data; `more` are the files that the program
    /// itself writes and reads. Errors use `name` to name the option of a file, such as `trace`. See [`files::check`].
    ///
    /// # Errors
    /// As [`files::check`].
    pub fn check_outputs_with(
        &self,
        model: &Path,
        more: (&[Output<'_>], &[Input<'_>]),
        name: impl Fn(&'static str) -> &'static str,
    ) -> Result<(), OutputError> {
        let shards = shards_by_name(model);
        let low_shards = match &self.low {
            Some(LowSource::File(path)) => shards_by_name(path),
            _ => Vec::new(),
        };
        let written = [("trace", &self.trace, Kind::Trace), ("cache_state", &self.cache_state, Kind::CacheState)];
        let written = written
            .into_iter()
            .filter_map(|(setting, path, kind)| Some(Output { flag: name(setting), path: path.as_deref()?, kind }));
        let outputs: Vec<Output<'_>> = written.chain(more.0.iter().copied()).collect();
        let mut inputs: Vec<Input<'_>> = shards.iter().map(|path| Input { flag: name("model"), path }).collect();
        inputs.extend(low_shards.iter().map(|path| Input { flag: name("low"), path }));
        let files = [("path_table", &self.path_table), ("profile", &self.profile)];
        let read = files.into_iter().filter_map(|(setting, path)| Some((setting, path.as_deref()?)));
        let read = read.chain(self.adapters.files());
        inputs.extend(read.map(|(setting, path)| Input { flag: name(setting), path }));
        inputs.extend_from_slice(more.1);
        files::check(&outputs, &inputs)
    }

    /// As [`ModelOptions::check_outputs_with`], for a program that writes no files itself.
    ///
    /// # Errors
    /// As [`files::check`].
    pub fn check_outputs(&self, model: &Path) -> Result<(), OutputError> {
        self.check_outputs_with(model, (&[], &[]), |setting| setting)
    }
}
