//! Evaluates tasks that ask which of several texts is most probable: their common beginning once, then all endings.

use std::collections::HashMap;
use std::ops::Range;

use anyhow::{Result, bail};

use super::evaluate;
use super::{Desk, Shape};
use hobbit::perplexity::softmax::log_prob_f32;
use hobbit::perplexity::tasks::{Alternatives, Question, RowAt, groups};
use hobbit::{BatchToken, Session};

/// Tasks with their questions, and which of them are evaluated together.
pub struct Choices {
    pub tasks: Vec<(Alternatives, Vec<Question>)>,
    groups: Vec<Range<usize>>,
    pub shape: Shape,
}

impl Choices {
    /// Groups tasks so that llama.cpp's context would hold each group: `-np` sequences that share `-np` times `-c`
    /// tokens.
    pub fn new(desk: &Desk, tasks: Vec<(Alternatives, Vec<Question>)>) -> Result<Self> {
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
    pub fn run(
        &self,
        desk: &Desk,
        session: &mut Session,
        mut each: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
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
