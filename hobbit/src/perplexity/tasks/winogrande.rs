//! Winogrande: which of two names makes the rest of the sentence more probable.

use super::alternatives::{Alternatives, Question, RowAt};

/// Tokens beyond the common beginning from which only what follows the name is scored.
const TRAILING_MIN: usize = 3;

/// One task: a sentence with a gap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Winogrande {
    /// Text before the gap.
    pub first: String,
    /// Text after the gap.
    pub second: String,
    /// What may fill it.
    pub choices: [String; 2],
    /// The right choice, 1 or 2.
    pub answer: usize,
}

/// Reads lines `index,sentence,choice 1,choice 2,answer`, the sentence in double quotes or not: the tasks, and why other
/// lines are none.
///
/// As in llama.cpp a last line without a newline is not read, and `-f` drops one newline at the end of a file: the
/// published file ends with an empty line.
pub fn parse_winogrande(text: &str) -> (Vec<Winogrande>, Vec<String>) {
    let lines = text.rsplit_once('\n').into_iter().flat_map(|(lines, _)| lines.split('\n'));
    let (tasks, complaints): (Vec<_>, Vec<_>) = lines.map(task).partition(Result::is_ok);
    (tasks.into_iter().flatten().collect(), complaints.into_iter().filter_map(Result::err).collect())
}

fn task(line: &str) -> Result<Winogrande, String> {
    let mut is_quoted = false;
    let commas: Vec<usize> = line
        .bytes()
        .enumerate()
        .filter_map(|(i, byte)| {
            is_quoted ^= byte == b'"';
            (byte == b',' && !is_quoted).then_some(i)
        })
        .take(4)
        .collect();
    let &[index, sentence, choice1, choice2] = commas.as_slice() else {
        return Err(format!("failed to find comma separators in <{line}>"));
    };
    let typed = &line[index + 1..sentence];
    let sentence = typed.strip_prefix('"').map_or(typed, |quoted| quoted.strip_suffix('"').unwrap_or(quoted));
    let Some((first, second)) = sentence.split_once('_') else { return Err(format!("no _ in <{sentence}>")) };
    let typed = &line[choice2 + 1..];
    let number = typed.trim_start();
    let digits = number.find(|c: char| !c.is_ascii_digit()).unwrap_or(number.len());
    let answer = number[..digits].parse().ok().filter(|answer| (1..=2).contains(answer));
    Ok(Winogrande {
        first: first.to_owned(),
        second: second.to_owned(),
        choices: [line[commas[1] + 1..choice1].to_owned(), line[choice1 + 1..choice2].to_owned()],
        answer: answer.ok_or_else(|| format!("failed to parse answer <{typed}>"))?,
    })
}

impl Winogrande {
    /// The two texts.
    pub fn texts(&self) -> [String; 2] {
        [0, 1].map(|i| format!("{}{}{}", self.first, self.choices[i], self.second))
    }

    /// The two texts up to the name and with it.
    pub fn bases(&self) -> [String; 2] {
        [0, 1].map(|i| format!("{}{}", self.first, self.choices[i]))
    }
}

/// Which tokens of a task are scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WinoBases {
    starts: [usize; 2],
}

impl WinoBases {
    /// `n_base`: tokens of each of [`Winogrande::bases`]. What follows the name is scored, or the name too where little
    /// follows.
    pub fn new(task: &Alternatives, n_base: [usize; 2]) -> Self {
        let prefix = task.common_prefix;
        let skips_names = task.sequences.iter().all(|sequence| sequence.len() - prefix > TRAILING_MIN);
        let start = |i: usize| match skips_names {
            // Where tokens run across the end of the name the counts need not fit.
            true => n_base[i].clamp(prefix, task.sequences[i].len() - 1),
            false => prefix,
        };
        Self { starts: [start(0), start(1)] }
    }

    /// Scored positions of a text: all but the last token, unless it is the only one.
    fn positions(self, task: &Alternatives, i: usize) -> std::ops::Range<usize> {
        let len = task.sequences[i].len();
        self.starts[i]..len - usize::from(len - self.starts[i] > 1)
    }

    /// Questions for every scored token, first text first.
    pub fn questions(self, task: &Alternatives) -> Vec<Question> {
        let row = |i: usize, position: usize| match task.row_before(i, position) {
            // llama.cpp takes the logits after the first text here instead of those after the common beginning (a known
            // flaw); so do we, or scores could not be compared.
            RowAt::Prefix if i == 1 => RowAt::Ending { sequence: 0, position: task.sequences[0].len() - 1 },
            row => row,
        };
        let of_text = |i: usize| {
            let tokens = &task.sequences[i];
            self.positions(task, i).map(move |position| Question { row: row(i, position), token: tokens[position] })
        };
        of_text(0).chain(of_text(1)).collect()
    }

    /// Mean log-probability of both texts, from the answers to [`WinoBases::questions`].
    pub fn scores(self, task: &Alternatives, answers: &[f32]) -> [f32; 2] {
        let (first, second) = answers.split_at(self.positions(task, 0).len().min(answers.len()));
        [first, second].map(|answers| answers.iter().sum::<f32>() / answers.len() as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        let text = "0,Sarah was better than Maria so _ got the easy cases.,Sarah,Maria,2\n\
                    1,\"Ian, not Dennis, ate because _ was hungry, he said.\",Ian,Dennis, 1 \n";
        let (tasks, complaints) = parse_winogrande(text);
        assert_eq!(complaints, Vec::<String>::new());
        assert_eq!(tasks[0].texts()[1], "Sarah was better than Maria so Maria got the easy cases.");
        assert_eq!(tasks[0].answer, 2);
        assert_eq!(tasks[1].first, "Ian, not Dennis, ate because ");
        assert_eq!(tasks[1].second, " was hungry, he said.");
        assert_eq!((tasks[1].bases()[0].as_str(), tasks[1].answer), ("Ian, not Dennis, ate because Ian", 1));
    }

    #[test]
    fn bad_lines_are_told_and_the_last_needs_its_newline() {
        let (tasks, complaints) = parse_winogrande("a,b\n1,no gap,A,B,1\n1,a _ b,A,B,3\n1,a _ b,A,B,1");
        assert_eq!(tasks, []);
        assert_eq!(
            complaints,
            ["failed to find comma separators in <a,b>", "no _ in <no gap>", "failed to parse answer <3>"]
        );
        assert_eq!(parse_winogrande("1,a _ b,A,B,1").0, []);
    }

    fn task(first: &[i32], second: &[i32]) -> Alternatives {
        Alternatives::new(1, vec![first.to_vec(), second.to_vec()]).unwrap()
    }

    #[test]
    fn what_follows_the_name_is_scored() {
        let task = task(&[0, 1, 2, 10, 11, 12, 13], &[0, 1, 3, 4, 10, 11, 12]);
        let bases = WinoBases::new(&task, [3, 4]);
        let rows: Vec<_> = bases.questions(&task).iter().map(|question| (question.row, question.token)).collect();
        let at = |sequence, position| RowAt::Ending { sequence, position };
        assert_eq!(rows, [(at(0, 2), 10), (at(0, 3), 11), (at(0, 4), 12), (at(1, 3), 10), (at(1, 4), 11)]);
        assert_eq!(bases.scores(&task, &[-1.0, -2.0, -3.0, -4.0, -6.0]), [-2.0, -5.0]);
    }

    #[test]
    fn names_are_scored_where_little_follows() {
        let task = task(&[0, 1, 2], &[0, 1, 3, 10]);
        let bases = WinoBases::new(&task, [3, 3]);
        let rows: Vec<_> = bases.questions(&task).iter().map(|question| (question.row, question.token)).collect();
        assert_eq!(rows, [(RowAt::Prefix, 2), (RowAt::Ending { sequence: 0, position: 2 }, 3)]);
    }

    #[test]
    fn counts_that_do_not_fit_are_brought_inside() {
        let task = task(&[0, 1, 2, 10, 11, 12], &[0, 1, 3, 10, 11, 12]);
        for n_base in [[0, 0], [99, 99]] {
            let bases = WinoBases::new(&task, n_base);
            assert!(!bases.questions(&task).is_empty());
            let n = bases.questions(&task).len();
            assert!(bases.scores(&task, &vec![-1.0; n]).iter().all(|score| *score == -1.0));
        }
    }
}
