//! From a program's words to its arguments, the same way in every program: pages, llama.cpp's spelling and flags that
//! hobbit lacks, variables, presets, contradictions, and help.

use std::any::TypeId;
use std::error::Error;
use std::ffi::OsString;
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};

use anyhow::Result;
use clap::builder::Styles;
use clap::builder::styling::AnsiColor;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{ArgMatches, Command, FromArgMatches};

use super::preset::PresetWords;
use super::{PrecisionArgs, RoutingArgs, model, table};
use crate::argv::{self, Grammar, Line, Note, REPACK, Switch, Tri};
use crate::exit::{self, Answered};
use crate::manuals;

/// Reads the words after a program's name.
///
/// # Errors
/// [`Answered`] if the words ask for a page, or are wrong; or a page that cannot be printed.
pub fn read<A>(
    command: fn() -> Command,
    words: Vec<OsString>,
    parse: impl FnOnce(Vec<OsString>) -> Result<A, clap::Error>,
) -> Result<A> {
    if let Some(status) = manuals::answer(command, &words) {
        return Err(Answered(status?).into());
    }
    parse(words).or_else(|error| Err(Answered(exit::usage(&error)?).into()))
}

/// A derived command with the common behaviour of llama.cpp's programs: a repeated flag overrides, and
/// [`AboutArgs`](super::AboutArgs) handles help and version.
pub fn as_program(command: Command) -> Command {
    let command = command.version(env!("HOBBIT_VERSION")).max_term_width(110).args_override_self(true);
    let styles = Styles::styled()
        .header(AnsiColor::Green.on_default().bold())
        .usage(AnsiColor::Green.on_default().bold())
        .literal(AnsiColor::Cyan.on_default().bold())
        .placeholder(AnsiColor::Cyan.on_default());
    let command = command.styles(styles).disable_help_flag(true).disable_version_flag(true);
    let mut sorted: Vec<_> = command.get_arguments().cloned().collect();
    sorted.sort_by_key(table::rank);
    let mut sorted = sorted.into_iter();
    with_spellings(command.mut_args(|arg| sorted.next().unwrap_or(arg)))
}

/// The command whose help has only the flags that most people need, and the examples.
fn brief(command: Command) -> Command {
    let examples = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let examples = examples.split("\n\n").next().unwrap_or_default().to_owned();
    let more = format!("{examples}\n\n{} --help lists every flag.", command.get_name());
    command.after_help(more).mut_args(|arg| {
        let Some(place) = table::place_in_brief(&arg) else {
            return arg.hide(true);
        };
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let first = help.split(". ").next().unwrap_or_default();
        let also = help.find(" [also: ").map_or("", |at| &help[at..]);
        let help = if first.contains(also) { first.to_owned() } else { format!("{first}{also}") };
        arg.help(help).help_heading(None::<&str>).display_order(place).hide_env(true)
    })
}

/// Adds to a derived command the parts that the derive cannot express: the forms of switches, and llama.cpp's other
/// spellings.
pub fn with_spellings(command: Command) -> Command {
    with_switches(command).mut_args(|arg| {
        let is_named = |name| arg.get_value_names().is_some_and(|names| names == [name]);
        let (is_switch, is_tri) = (is_named(Switch::NAME), is_named(Tri::NAME) || is_named(REPACK));
        let is_on = arg.get_default_values() == ["on"];
        let spellings = arg.get_long().into_iter().flat_map(table::spellings);
        let mut also: Vec<_> = spellings.map(|(spelling, _)| spelling.to_owned()).collect();
        if let Some(long) = arg.get_long().filter(|_| is_switch && is_on) {
            also.push(format!("--no-{long}"));
        }
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let help = if also.is_empty() { help } else { format!("{help} [also: {}]", also.join(", ")) };
        let arg = arg.help(help).hide_env_values(true).hide_default_value(is_switch && !is_on);
        if is_switch || is_tri { arg.num_args(0..=1).require_equals(true).default_missing_value("on") } else { arg }
    })
}

/// Names the values of switches, and switches off or leaves to choice what the declaration does not switch on.
pub fn with_switches(command: Command) -> Command {
    command.mut_args(|arg| {
        let kinds = [(TypeId::of::<Switch>(), Switch::NAME, "off"), (TypeId::of::<Tri>(), Tri::NAME, "auto")];
        let is_of = |kind: &(TypeId, _, _)| arg.get_value_parser().type_id() == kind.0;
        let Some((_, name, default)) = kinds.into_iter().find(is_of) else { return arg };
        // The derive requires a value where the declaration gives no default.
        if arg.is_required_set() {
            arg.value_name(name).required(false).default_value(default)
        } else {
            arg.value_name(name)
        }
    })
}

/// Parses the words after a program's name.
pub fn parse_as<A: FromArgMatches>(
    mut command: Command,
    words: impl IntoIterator<Item = OsString>,
) -> Result<(A, Vec<Note>), clap::Error> {
    let mut line = normalised(&mut command, words)?;
    let negated = argv::negated_by_environment(&command, |name| std::env::var_os(name).is_some());
    let preset = PresetWords::of(&line.words, &command, |name| std::env::var_os(name));
    if line.is_brief {
        command = brief(command);
    }
    let words = negated.into_iter().chain(preset.words.iter().cloned()).chain(line.words);
    let mut matches = matched(&mut command, words)?;
    check_precision(&matches, &preset, &mut command)?;
    line.notes.extend(preset.note());
    Ok((A::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))?, line.notes))
}

/// The words in clap's spelling. Variables that do not count are taken from the command.
pub fn normalised(command: &mut Command, words: impl IntoIterator<Item = OsString>) -> Result<Line, clap::Error> {
    let line = argv::normalise(words, &grammar(command));
    let line = line.map_err(|error| command.error(ErrorKind::UnknownArgument, error))?;
    *command = model::without_idle_variables(std::mem::take(command), &line.words);
    Ok(line)
}

/// clap's answer to normalised words, with the model's source checked.
pub fn matched(command: &mut Command, words: impl Iterator<Item = OsString>) -> Result<ArgMatches, clap::Error> {
    let words = std::iter::once(OsString::from(command.get_name())).chain(words);
    let matches = command.try_get_matches_from_mut(words).map_err(|error| in_plain_words(error, command))?;
    model::check(&matches).map_err(|error| command.error(ErrorKind::ArgumentConflict, error))?;
    Ok(matches)
}

/// The spellings of a command, which knows the flags of the other programs.
pub fn grammar(command: &Command) -> Grammar {
    fn elsewhere(name: &str) -> Option<String> {
        let has = |command: Command| Grammar::of(&command, |_| None).has(name);
        #[cfg(feature = "engine")]
        if has(super::server::command()) {
            return Some("; hobbit-server has it".to_owned());
        }
        has(super::command()).then(|| "; hobbit-cli has it".to_owned())
    }
    Grammar::of(command, elsewhere)
}

/// Most letters that a suggested flag may differ from an unknown one; clap suggests unrelated words, too.
const TYPOS: usize = 3;

/// An error of clap's without far-fetched suggestions, and without the standard library's words for numbers.
fn in_plain_words(mut error: clap::Error, command: &mut Command) -> clap::Error {
    let text = |error: &clap::Error, kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.clone(),
        _ => String::new(),
    };
    let (arg, value) = (text(&error, ContextKind::InvalidArg), text(&error, ContextKind::InvalidValue));
    if strsim::damerau_levenshtein(&arg, &text(&error, ContextKind::SuggestedArg)) > TYPOS {
        error.remove(ContextKind::SuggestedArg);
    }
    let source = error.source();
    let whole = source.and_then(|source| source.downcast_ref()).map(ParseIntError::kind);
    let wanted = match whole {
        Some(IntErrorKind::PosOverflow | IntErrorKind::NegOverflow) => "this number is too large",
        Some(_) => "expected a whole number",
        None if source.is_some_and(|source| source.is::<ParseFloatError>()) => "expected a number",
        None => return error,
    };
    command.error(ErrorKind::ValueValidation, format!("invalid value '{value}' for '{arg}': {wanted}"))
}

/// Reports contradictions among the flags of dynamic precision as clap errors.
fn check_precision(matches: &ArgMatches, preset: &PresetWords, command: &mut Command) -> Result<(), clap::Error> {
    let is_typed = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
    let args = PrecisionArgs::from_arg_matches(matches).map_err(|error| error.format(command))?;
    let routing = RoutingArgs::from_arg_matches(matches).map_err(|error| error.format(command))?;
    args.check(is_typed).and_then(|()| routing.check(&args)).map_err(|error| {
        let error = match preset.share_in(&error) {
            Some(share) => format!("{error} ({share})"),
            None => error,
        };
        command.error(ErrorKind::ArgumentConflict, error)
    })
}
