//! Multiple choice: ARC, MMLU, TruthfulQA and the like, in llama.cpp's binary form.
//!
//! Little-endian: `u32 n`, `u32 position[n]` of each task from the start of the file, then the tasks: question, answers
//! with one right one, answers with several right ones. A string is `u32` length and bytes; answers are `u32 n`, n
//! strings and `i32 label[n]`, 1 for right.

use super::TaskError;

/// llama.cpp reads no more answers.
const ANSWERS_MAX: u32 = 100;

/// One task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MultipleChoice {
    /// The question, or the text to be continued.
    pub question: String,
    /// Possible answers; a space belongs before each.
    pub answers: Vec<String>,
    /// For each answer whether it is right.
    pub is_right: Vec<bool>,
}

impl MultipleChoice {
    /// The texts.
    pub fn texts(&self) -> impl Iterator<Item = String> + '_ {
        self.answers.iter().map(|answer| format!("{} {answer}", self.question))
    }
}

/// A file's bytes and where its tasks lie.
#[derive(Clone, Debug)]
pub struct MultipleChoiceFile<'a> {
    bytes: &'a [u8],
    positions: Vec<usize>,
}

impl<'a> MultipleChoiceFile<'a> {
    /// Reads the table of tasks.
    ///
    /// # Errors
    /// No tasks, or a file that is too short for its table.
    pub fn new(bytes: &'a [u8]) -> Result<Self, TaskError> {
        let mut rest = Cursor { bytes, at: 0 };
        let n_task = rest.u32("the number of tasks").map_err(|_| TaskError::NoTasks)?;
        if n_task == 0 {
            return Err(TaskError::NoTasks);
        }
        let table = rest.take(n_task as usize * 4, "the table of tasks")?;
        let position = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as usize;
        Ok(Self { bytes, positions: table.chunks_exact(4).map(position).collect() })
    }

    /// Number of tasks.
    pub fn n_tasks(&self) -> usize {
        self.positions.len()
    }

    /// All tasks, one after the other as they lie in the file, or those with the given numbers by the table of
    /// positions.
    ///
    /// # Errors
    /// A task that does not lie inside the file or cannot be asked.
    pub fn tasks(&self, picked: Option<&[usize]>) -> Result<Vec<MultipleChoice>, TaskError> {
        let mut rest = Cursor { bytes: self.bytes, at: 4 + 4 * self.positions.len() };
        let Some(picked) = picked else { return (0..self.n_tasks()).map(|i| rest.task(i)).collect() };
        let at =
            |&i: &usize| Cursor { bytes: self.bytes, at: self.positions.get(i).copied().unwrap_or(usize::MAX) }.task(i);
        picked.iter().map(at).collect()
    }
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, n: usize, what: &str) -> Result<&'a [u8], TaskError> {
        let end = self.at.checked_add(n);
        let taken = end.and_then(|end| self.bytes.get(self.at..end));
        let taken = taken.ok_or_else(|| TaskError::CutOff { what: what.to_owned() })?;
        self.at += n;
        Ok(taken)
    }

    fn u32(&mut self, what: &str) -> Result<u32, TaskError> {
        self.take(4, what).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
    }

    fn string(&mut self, task: usize, what: &str) -> Result<String, TaskError> {
        let length = self.u32(what)? as usize;
        let bytes = self.take(length, what)?;
        String::from_utf8(bytes.to_vec())
            .map_err(|_| TaskError::Malformed { task: task + 1, why: "a text is not UTF-8" })
    }

    fn answers(&mut self, task: usize, what: &str) -> Result<(Vec<String>, Vec<bool>), TaskError> {
        let n = self.u32(what)?;
        if n > ANSWERS_MAX {
            return Err(TaskError::Malformed { task: task + 1, why: "more than 100 answers" });
        }
        let answers = (0..n).map(|_| self.string(task, what)).collect::<Result<_, _>>()?;
        let labels = (0..n).map(|_| Ok(self.u32(what)? == 1)).collect::<Result<_, _>>()?;
        Ok((answers, labels))
    }

    fn task(&mut self, i: usize) -> Result<MultipleChoice, TaskError> {
        let what = format!("task {}", i + 1);
        let question = self.string(i, &what)?;
        let (answers, is_right) = self.answers(i, &what)?;
        // With several right answers: not scored by llama.cpp either.
        self.answers(i, &what)?;
        let malformed = |why| Err(TaskError::Malformed { task: i + 1, why });
        match () {
            () if question.is_empty() || answers.is_empty() => malformed("an empty question, or no answers"),
            () if answers.iter().any(String::is_empty) => malformed("an empty answer"),
            () => Ok(MultipleChoice { question, answers, is_right }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn string(text: &str) -> Vec<u8> {
        [&(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
    }

    fn answers(texts: &[&str], right: usize) -> Vec<u8> {
        let mut bytes = (texts.len() as u32).to_le_bytes().to_vec();
        bytes.extend(texts.iter().flat_map(|text| string(text)));
        bytes.extend((0..texts.len()).flat_map(|i| i32::from(i == right).to_le_bytes()));
        bytes
    }

    fn task(question: &str, texts: &[&str], right: usize) -> Vec<u8> {
        [string(question), answers(texts, right), answers(&[], 0)].concat()
    }

    fn file(tasks: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = (tasks.len() as u32).to_le_bytes().to_vec();
        let mut at = 4 + 4 * tasks.len() as u32;
        for task in tasks {
            bytes.extend(at.to_le_bytes());
            at += task.len() as u32;
        }
        [bytes, tasks.concat()].concat()
    }

    #[test]
    fn tasks_are_read_in_order_or_by_number() {
        let bytes = file(&[task("one?", &["a", "b"], 1), task("two?", &["c", "d", "e"], 0)]);
        let read = MultipleChoiceFile::new(&bytes).unwrap();
        let all = read.tasks(None).unwrap();
        assert_eq!((read.n_tasks(), all.len()), (2, 2));
        assert_eq!(all[0].texts().collect::<Vec<_>>(), ["one? a", "one? b"]);
        assert_eq!(all[0].is_right, [false, true]);
        assert_eq!(read.tasks(Some(&[1])).unwrap(), all[1..]);
        assert!(matches!(read.tasks(Some(&[2])), Err(TaskError::CutOff { .. })));
    }

    #[test]
    fn no_prefix_of_a_file_is_a_file() {
        let bytes = file(&[task("one?", &["a", "b"], 1)]);
        for length in 0..bytes.len() {
            let error = MultipleChoiceFile::new(&bytes[..length]).and_then(|file| file.tasks(None)).unwrap_err();
            assert!(matches!(error, TaskError::NoTasks | TaskError::CutOff { .. }), "{length}: {error}");
        }
        assert!(MultipleChoiceFile::new(&u32::MAX.to_le_bytes()).is_err());
    }

    #[test]
    fn malformed_tasks_are_named() {
        let many = vec!["x"; 101];
        for (bad, why) in [
            (task("", &["a"], 0), "empty question"),
            (task("q", &[], 0), "no answers"),
            (task("q", &["a", ""], 0), "empty answer"),
            (task("q", &many, 0), "more than 100"),
            ([&3u32.to_le_bytes()[..], b"\xff\xfe\xfd"].concat(), "UTF-8"),
        ] {
            let bytes = file(&[task("fine", &["a"], 0), bad]);
            let error = MultipleChoiceFile::new(&bytes).unwrap().tasks(None).unwrap_err().to_string();
            assert!(error.starts_with("task 2 is malformed: ") && error.contains(why), "{error}");
        }
    }
}
