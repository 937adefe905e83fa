//! HellaSwag, Winogrande and multiple choice: which tasks, and what is made of their log-probabilities.

use std::collections::HashMap;
use std::ops::Range;

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::{Desk, Measurement, Shape, evaluate, format};
use crate::log::Level;
use hobbit::perplexity::estimate::Estimate;
use hobbit::perplexity::random::{drawn_by_scaling, drawn_evenly};
use hobbit::perplexity::softmax::log_prob_f32;
use hobbit::perplexity::tasks::{
    Alternatives, MultipleChoiceFile, Question, RowAt, WinoBases, best, groups, parse_hellaswag, parse_winogrande,
    wilson_interval,
};
use hobbit::{BatchToken, Model, Session, Token};

/// Fewest tasks for which `llama-perplexity` prints a final Winogrande score.
const TASKS_MIN: usize = 100;
/// Most multiple-choice tasks for which it shows how far it has prepared them.
const PREPARED_SLOWLY_MAX: usize = 500;

fn tokenised(model: &Model, texts: impl IntoIterator<Item = String>) -> Result<Vec<Vec<Token>>> {
    texts.into_iter().map(|text| Ok(model.tokenize(&text, true, false)?)).collect()
}

/// Prepares HellaSwag.
///
/// # Errors
/// A file of another form, tasks that do not fit in the context.
pub fn hellaswag<'a>(desk: &'a Desk, model: &Model, n_tasks: usize) -> Result<Measurement<'a>> {
    let info = |line: String| desk.log.line(Level::Info, format!("hellaswag_score : {line}"));
    let text = desk.text()?;
    let tasks = parse_hellaswag(text.as_str()?).with_context(|| text.name.display().to_string())?;
    info(format!("loaded {} tasks from prompt.", tasks.len()));
    let n_tasks = n_tasks.min(tasks.len());
    info(format!("selecting {n_tasks} randomized tasks."));
    let (mut prepared, mut golds) = (Vec::new(), Vec::new());
    for i in drawn_evenly(tasks.len(), n_tasks) {
        let task = Alternatives::new(i + 1, tokenised(model, tasks[i].texts())?)?;
        let questions = task.whole_endings();
        prepared.push((task, questions));
        golds.push(tasks[i].gold);
    }
    info("calculating hellaswag score over selected tasks.".to_owned());
    let choices = Choices::new(desk, prepared)?;
    Ok(Measurement::new(choices.shape, move |session| {
        desk.print("\ntask\tacc_norm\t95% confidence interval\n")?;
        let mut n_right = 0;
        choices.run(desk, session, |i, answers| {
            let chosen = best(&choices.tasks[i].0.mean_log_probs(answers));
            n_right += usize::from(chosen == golds[i]);
            desk.print(&format::hellaswag(i + 1, wilson_interval(n_right, i + 1)))
        })?;
        desk.print("\n")?;
        let n = choices.tasks.len();
        Ok(json!({ "n_tasks": n, "n_right": n_right, "acc_norm": wilson_interval(n_right, n) }))
    }))
}

/// Prepares Winogrande.
///
/// # Errors
/// No tasks, tasks that do not fit in the context.
pub fn winogrande<'a>(desk: &'a Desk, model: &Model, n_tasks: Option<usize>) -> Result<Measurement<'a>> {
    let info = |line: String| desk.log.line(Level::Info, format!("winogrande_score : {line}"));
    let text = desk.text()?;
    let (tasks, complaints) = parse_winogrande(text.as_str()?);
    for why in &complaints {
        desk.log.line(Level::Error, format!("load_winogrande_from_csv: {why}"));
    }
    if tasks.is_empty() {
        bail!("{}: no tasks (lines of index,sentence with _,choice 1,choice 2,answer)", text.name.display());
    }
    info(format!("loaded {} tasks from prompt.", tasks.len()));
    let picked = match n_tasks.filter(|&n| n < tasks.len()) {
        Some(n) => {
            info(format!("selecting {n} random tasks"));
            drawn_by_scaling(tasks.len(), n)
        }
        None => (0..tasks.len()).collect(),
    };
    info("tokenizing selected tasks".to_owned());
    let (mut prepared, mut bases, mut right) = (Vec::new(), Vec::new(), Vec::new());
    for i in picked {
        let task = Alternatives::new(i + 1, tokenised(model, tasks[i].texts())?)?;
        let counts = tokenised(model, tasks[i].bases())?;
        let base = WinoBases::new(&task, [counts[0].len(), counts[1].len()]);
        let questions = base.questions(&task);
        prepared.push((task, questions));
        bases.push(base);
        right.push(tasks[i].answer);
    }
    info("calculating winogrande score over selected tasks.".to_owned());
    let choices = Choices::new(desk, prepared)?;
    Ok(Measurement::new(choices.shape, move |session| {
        let mut n_right = 0;
        choices.run(desk, session, |i, answers| {
            let scores = bases[i].scores(&choices.tasks[i].0, answers);
            let chosen = if scores[0] > scores[1] { 1 } else { 2 };
            n_right += usize::from(chosen == right[i]);
            desk.print(&format::winogrande(i + 1, n_right, scores, chosen, right[i]))
        })?;
        desk.print("\n")?;
        let n = choices.tasks.len();
        let score = Estimate::share(n_right, n);
        if n >= TASKS_MIN {
            let Estimate { value, uncertainty } = score.scaled(100.0);
            let line = format!("Final Winogrande score({n} tasks): {value:.4} +/- {uncertainty:.4}");
            desk.log.line(Level::Info, line);
        }
        Ok(json!({ "n_tasks": n, "n_right": n_right, "acc": score }))
    }))
}

/// Prepares multiple choice.
///
/// # Errors
/// A file of another form, malformed tasks, tasks that do not fit in the context.
pub fn multiple_choice<'a>(desk: &'a Desk, model: &Model, n_tasks: Option<usize>) -> Result<Measurement<'a>> {
    let info = |line: String| desk.log.line(Level::Info, format!("multiple_choice_score: {line}"));
    let text = desk.text()?;
    let name = || text.name.display().to_string();
    let file = MultipleChoiceFile::new(&text.bytes).with_context(name)?;
    let n = file.n_tasks();
    info(format!("there are {n} tasks in prompt"));
    let picked = n_tasks.filter(|&wanted| wanted < n).map(|wanted| {
        info(format!("selecting {wanted} random tasks from {n} tasks available"));
        drawn_by_scaling(n, wanted)
    });
    let tasks = file.tasks(picked.as_deref()).with_context(name)?;
    if picked.is_none() {
        desk.log.text(Level::Info, "multiple_choice_score: reading tasks");
        desk.print(&format::dots(n))?;
    }
    desk.log.text(Level::Info, "multiple_choice_score: preparing task data");
    desk.print(&if tasks.len() > PREPARED_SLOWLY_MAX { "...done\n".to_owned() } else { format::dots(tasks.len()) })?;
    let (mut prepared, mut is_right) = (Vec::new(), Vec::new());
    for (i, task) in tasks.iter().enumerate() {
        let number = picked.as_ref().map_or(i, |picked| picked[i]) + 1;
        let choices = Alternatives::new(number, tokenised(model, task.texts())?)?;
        let questions = choices.whole_endings();
        prepared.push((choices, questions));
        is_right.push(task.is_right.clone());
    }
    desk.log
        .line(Level::Info, format!("multiple_choice_score : calculating TruthfulQA score over {} tasks.", tasks.len()));
    let choices = Choices::new(desk, prepared)?;
    Ok(Measurement::new(choices.shape, move |session| {
        desk.print("\ntask\tacc_norm\n")?;
        let (mut n_right, mut n_answers) = (0, 0);
        choices.run(desk, session, |i, answers| {
            let chosen = best(&choices.tasks[i].0.mean_log_probs(answers));
            n_right += usize::from(is_right[i][chosen]);
            n_answers += is_right[i].len();
            desk.print(&format::multiple_choice(i + 1, n_right))
        })?;
        let n = choices.tasks.len();
        let score = Estimate::share(n_right, n);
        let by_chance = n as f64 / n_answers as f64;
        let chance =
            Estimate { value: by_chance, uncertainty: (by_chance * (1.0 - by_chance) / (n as f64 - 1.0)).sqrt() };
        desk.print("\n")?;
        for (name, share) in [("Final result", score), ("Random chance", chance)] {
            let Estimate { value, uncertainty } = share.scaled(100.0);
            desk.log.line(Level::Info, format!("{name}: {value:.4} +/- {uncertainty:.4}"));
        }
        Ok(json!({ "n_tasks": n, "n_right": n_right, "acc_norm": score, "random_chance": chance }))
    }))
}

/// Tasks with their questions, and which of them are evaluated together.
struct Choices {
    tasks: Vec<(Alternatives, Vec<Question>)>,
    groups: Vec<Range<usize>>,
    shape: Shape,
}

impl Choices {
    /// Groups tasks so that llama.cpp's context would hold each group: `-np` sequences that share `-np` times `-c`
    /// tokens.
    fn new(desk: &Desk, tasks: Vec<(Alternatives, Vec<Question>)>) -> Result<Self> {
        let options = &desk.args.session_options;
        let n_seq = desk.args.n_parallel;
        let n_ctx = options.n_ctx as usize * n_seq;
        let alone: Vec<&Alternatives> = tasks.iter().map(|(task, _)| task).collect();
        let groups = groups(&alone, n_ctx, n_seq).or_else(|i| {
            let (required, n_texts) = (alone[i].required_tokens(), alone[i].sequences.len());
            if n_texts > n_seq {
                bail!("task {i} requires a higher -np|--parallel value (at least {n_texts})");
            }
            bail!("task {i} does not fit in the context window (requires {required} tokens): give a larger -c");
        })?;
        // Every sequence has room for the longest text: hobbit's sequences share no KV cells.
        let longest = alone.iter().map(|task| task.longest()).max().unwrap_or(1);
        let shape = Shape { n_ctx_seq: longest, n_batch: (options.n_batch as usize).min(n_ctx), n_seq };
        Ok(Self { tasks, groups, shape })
    }

    /// Evaluates all; `each` gets the number of a task and the log-probabilities that its questions asked for, task by
    /// task.
    fn run(&self, desk: &Desk, session: &mut Session, mut each: impl FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        let n_ubatch = (desk.args.session_options.n_ubatch as usize).min(self.shape.n_batch);
        for group in &self.groups {
            let answers = self.answers(session, group.clone(), n_ubatch)?;
            for (i, answers) in group.clone().zip(&answers) {
                each(i, answers)?;
            }
        }
        Ok(())
    }

    fn answers(&self, session: &mut Session, group: Range<usize>, n_ubatch: usize) -> Result<Vec<Vec<f32>>> {
        let tasks = &self.tasks[group];
        let mut answers: Vec<Vec<f32>> = tasks.iter().map(|(_, questions)| vec![f32::NAN; questions.len()]).collect();
        let mut asked: HashMap<(usize, RowAt), Vec<usize>> = HashMap::new();
        for (t, (_, questions)) in tasks.iter().enumerate() {
            for (q, question) in questions.iter().enumerate() {
                asked.entry((t, question.row)).or_default().push(q);
            }
        }
        let firsts: Vec<usize> = tasks
            .iter()
            .scan(0, |next, (task, _)| Some(std::mem::replace(next, *next + task.sequences.len())))
            .collect();

        // The beginnings, each in its task's first sequence, then copied to the others.
        let (mut batch, mut places) = (Vec::new(), Vec::new());
        for (t, (task, _)) in tasks.iter().enumerate() {
            for (position, &token) in task.sequences[0][..task.common_prefix].iter().enumerate() {
                let is_last = position + 1 == task.common_prefix;
                let logits = is_last && asked.contains_key(&(t, RowAt::Prefix));
                batch.push(BatchToken { token, position: position as i32, sequence: firsts[t] as i32, logits });
                places.push((t, RowAt::Prefix));
            }
        }
        let mut answer = |place: (usize, RowAt), logits: &[f32]| {
            for &q in asked.get(&place).into_iter().flatten() {
                answers[place.0][q] = log_prob_f32(logits, tasks[place.0].1[q].token);
            }
        };
        session.reset();
        evaluate::rows(session, &batch, n_ubatch, |i, logits| answer(places[i], logits))?;
        for (&first, (task, _)) in firsts.iter().zip(tasks) {
            for other in 1..task.sequences.len() {
                session.copy_sequence(first as i32, (first + other) as i32)?;
            }
        }

        // The endings, as far as anything is asked about them.
        (batch, places) = (Vec::new(), Vec::new());
        for (t, (task, _)) in tasks.iter().enumerate() {
            for (sequence, tokens) in task.sequences.iter().enumerate() {
                let place = |position| (t, RowAt::Ending { sequence, position });
                let Some(end) = (task.common_prefix..tokens.len()).rfind(|&at| asked.contains_key(&place(at))) else {
                    continue;
                };
                for (position, &token) in tokens.iter().enumerate().take(end + 1).skip(task.common_prefix) {
                    let place = place(position);
                    batch.push(BatchToken {
                        token,
                        position: position as i32,
                        sequence: (firsts[t] + sequence) as i32,
                        logits: asked.contains_key(&place),
                    });
                    places.push(place);
                }
            }
        }
        evaluate::rows(session, &batch, n_ubatch, |i, logits| answer(places[i], logits))?;
        Ok(answers)
    }
}
