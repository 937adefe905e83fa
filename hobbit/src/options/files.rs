//! Which files a run reads and writes.

use std::path::Path;

use super::{LowSource, ModelOptions};
use crate::files::{self, Input, Kind, Output, OutputError};
use crate::gguf::shards_by_name;

impl ModelOptions {
    /// The files that a run with these options writes, by the flags of the programs.
    fn outputs(&self) -> Vec<Output<'_>> {
        let files = [("--trace", &self.trace, Kind::Trace), ("--cache-state", &self.cache_state, Kind::CacheState)];
        files.into_iter().filter_map(|(flag, path, kind)| Some(Output { flag, path: path.as_deref()?, kind })).collect()
    }

    /// Checks that a run of `model` with these options destroys nothing; `more` are what the program writes itself, and what it
    /// reads. See [`files::check`].
    ///
    /// # Errors
    /// As [`files::check`].
    pub fn check_outputs_with(&self, model: &Path, more: (&[Output<'_>], &[Input<'_>])) -> Result<(), OutputError> {
        let shards = shards_by_name(model);
        let low_shards = match &self.low {
            Some(LowSource::File(path)) => shards_by_name(path),
            _ => Vec::new(),
        };
        let outputs = [self.outputs(), more.0.to_vec()].concat();
        let mut inputs: Vec<Input<'_>> = shards.iter().map(|path| Input { flag: "-m", path }).collect();
        inputs.extend(low_shards.iter().map(|path| Input { flag: "--low", path }));
        let files = [("--path-table", &self.path_table), ("--profile", &self.profile)];
        inputs.extend(files.into_iter().filter_map(|(flag, path)| Some(Input { flag, path: path.as_deref()? })));
        inputs.extend(self.adapters.files().map(|(flag, path)| Input { flag, path }));
        inputs.extend_from_slice(more.1);
        files::check(&outputs, &inputs)
    }

    /// As [`ModelOptions::check_outputs_with`], of a program that writes nothing itself.
    ///
    /// # Errors
    /// As [`files::check`].
    pub fn check_outputs(&self, model: &Path) -> Result<(), OutputError> {
        self.check_outputs_with(model, (&[], &[]))
    }
}
