//! Downloads in the terminal: a line at the start, a bar, and Ctrl-C, after which the same command resumes.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

#[cfg(feature = "hub")]
use anyhow::Context;
use anyhow::Result;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::hub::{Given, Places, Source, Witness};
use super::output::tell;
use super::signals;
use hobbit_core::units::Bytes;

const BAR: &str = "{bar:40} {percent:>3} % of {binary_total_bytes}, {binary_bytes_per_sec} {eta}";
const SPINNER: &str = "{spinner} {binary_bytes}, {binary_bytes_per_sec}";

/// Fetches what is missing of a model, with a bar if it `shows` progress; returns the model's first file.
pub fn run(source: &Source, places: &Places, shows: bool) -> Result<PathBuf> {
    let screen = Screen::new(shows);
    let bar = screen.bar.clone();
    let stop = move |signal: signals::Signal| {
        bar.finish_and_clear();
        tell("hobbit: stopped; run the same command to resume the download");
        std::process::exit(i32::from(signal.status()));
    };
    signals::during(stop, || fetch(source, places, &screen))?
}

/// Where models come from, and where they are kept.
pub fn places(given: Given) -> Result<Places> {
    let read = |path: &Path| hobbit_core::files::read_text(path, 1 << 12).ok();
    Places::new(given, |name| std::env::var_os(name), read).map_err(anyhow::Error::msg)
}

/// Fetches what is missing of a model; returns its first file.
#[cfg(feature = "hub")]
pub fn fetch(source: &Source, places: &Places, witness: &dyn Witness) -> Result<PathBuf> {
    super::hub::fetch(source, places, witness).context("the model was not fetched")
}

/// The first bytes of a model, which are not kept.
#[cfg(feature = "hub")]
pub fn beginning(source: &Source, places: &Places, n_bytes: u64) -> Result<Vec<u8>> {
    Ok(super::hub::beginning(source, places, n_bytes, &Screen::new(false))?)
}

#[cfg(not(feature = "hub"))]
pub fn fetch(_: &Source, _: &Places, _: &dyn Witness) -> Result<PathBuf> {
    anyhow::bail!(
        "this program was built without the feature 'hub', which fetches models; fetch the file and give it with -m"
    )
}

/// Progress on standard error.
struct Screen {
    shows: bool,
    bar: ProgressBar,
    /// The file announced last.
    announced: Mutex<String>,
}

impl Screen {
    fn new(shows: bool) -> Self {
        Self { shows, bar: ProgressBar::hidden(), announced: Mutex::default() }
    }
}

impl Witness for Screen {
    fn note(&self, text: &str) {
        if self.shows {
            self.bar.suspend(|| tell(format_args!("hobbit: {text}")));
        }
    }

    fn begin(&self, name: &str, size: Option<u64>, have: u64) {
        if !self.shows {
            return;
        }
        let mut announced = self.announced.lock().unwrap_or_else(PoisonError::into_inner);
        if *announced != name {
            name.clone_into(&mut announced);
            let size = size.map(|size| format!(" ({})", Bytes(size))).unwrap_or_default();
            self.bar.suspend(|| tell(format_args!("hobbit: downloading {name}{size}")));
        }
        let style = ProgressStyle::with_template(if size.is_some() { BAR } else { SPINNER });
        self.bar.set_style(style.expect("the template is constant and valid"));
        if let Some(size) = size {
            self.bar.set_length(size);
        }
        self.bar.reset();
        self.bar.set_position(have);
        self.bar.reset_eta();
        if std::io::stderr().is_terminal() {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }

    fn at(&self, bytes: u64) {
        self.bar.set_position(bytes);
    }

    fn end(&self) {
        self.bar.finish_and_clear();
    }

    fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_templates_are_valid() {
        for template in [BAR, SPINNER] {
            ProgressStyle::with_template(template).unwrap();
        }
    }
}
