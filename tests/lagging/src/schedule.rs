//! Virtual time: when every operation would start and end on a device with these speeds. No ggml, no clock.
//!
//! An operation submitted at host time h starts when its stream has done everything before it, h is reached and, for a
//! copy, the link is free; graphs of different streams do not disturb each other. All copies of a device share one
//! link. A copy takes the first gap of the link that is long enough; times are settled as soon as everything they
//! depend on is known, which for a graph is when it has run (its cost depends on the router's ids). The order of
//! execution therefore does not change the result, unless two streams ask for the same gap.
//!
//! Copies and the host's products share the host's memory. Of two that overlap, the one whose time is settled later
//! gets the bandwidth that the other leaves.

use std::collections::VecDeque;

use crate::Options;

/// When an event was recorded; settled later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moment(usize);

/// A submitted graph. Its cost is known when it has run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GraphId(usize);

#[derive(Clone, Copy)]
enum Step {
    Copy { seconds: f64 },
    Graph(GraphId),
    Record(Moment),
    Wait(Moment),
}

struct Entry {
    submitted: f64,
    step: Step,
}

#[derive(Default)]
struct Clock {
    time: f64,
    /// The time up to which the host has waited for the stream.
    seen: f64,
    /// Copies since then that make the host wait, each for itself.
    blocking: u32,
    /// Submitted, in order, not settled.
    open: VecDeque<Entry>,
}

/// The virtual times of one device, in seconds.
#[derive(Default)]
pub(crate) struct Schedule {
    pub(crate) host: f64,
    pub(crate) copy_busy: f64,
    pub(crate) compute_busy: f64,
    streams: Vec<Clock>,
    moments: Vec<Option<f64>>,
    graphs: Vec<Option<f64>>,
    link: Busy,
    /// The host's products.
    work: Busy,
    pub(crate) sharing: Sharing,
}

/// Speeds beside the other reader of host memory, as parts of the speed alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sharing {
    copies: f64,
    products: f64,
}

impl Default for Sharing {
    fn default() -> Self {
        Sharing { copies: 1.0, products: 1.0 }
    }
}

impl Sharing {
    /// However little is left, the reader goes on.
    const LEAST: f64 = 0.05;

    pub(crate) fn of(options: &Options) -> Self {
        let &Options { link_bandwidth, host_bandwidth, host_memory_bandwidth, .. } = options;
        if host_memory_bandwidth.is_infinite() {
            return Sharing::default();
        }
        let left = |own: f64, other: f64| ((host_memory_bandwidth - other) / own).clamp(Self::LEAST, 1.0);
        Sharing { copies: left(link_bandwidth, host_bandwidth), products: left(host_bandwidth, link_bandwidth) }
    }
}

impl Schedule {
    /// A new stream's index.
    pub(crate) fn stream(&mut self) -> usize {
        self.streams.push(Clock { time: self.host, seen: self.host, ..Clock::default() });
        self.streams.len() - 1
    }

    pub(crate) fn copy(&mut self, stream: usize, seconds: f64) {
        self.submit(stream, Step::Copy { seconds });
    }

    /// A copy that makes the host wait; its wait is counted at the next synchronisation, when all times are known.
    pub(crate) fn blocking_copy(&mut self, stream: usize, seconds: f64) {
        self.copy(stream, seconds);
        self.streams[stream].blocking += 1;
    }

    pub(crate) fn graph(&mut self, stream: usize) -> GraphId {
        let id = GraphId(self.graphs.len());
        self.graphs.push(None);
        self.submit(stream, Step::Graph(id));
        id
    }

    /// The graph has run, and takes this long.
    pub(crate) fn graph_done(&mut self, graph: GraphId, seconds: f64) {
        self.graphs[graph.0] = Some(seconds);
        self.settle();
    }

    pub(crate) fn record(&mut self, stream: usize) -> Moment {
        let moment = Moment(self.moments.len());
        self.moments.push(None);
        self.submit(stream, Step::Record(moment));
        moment
    }

    pub(crate) fn wait(&mut self, stream: usize, moment: Moment) {
        self.submit(stream, Step::Wait(moment));
    }

    /// A synchronous copy: the host waits for the link and for the copy, and `latency` longer.
    pub(crate) fn host_copy(&mut self, seconds: f64, latency: f64) {
        self.host = self.take_link(self.host, seconds) + latency;
    }

    /// The host multiplies, which takes so long if nothing is copied meanwhile.
    pub(crate) fn host_work(&mut self, seconds: f64) {
        let end = self.link.end_beside(self.host, seconds, self.sharing.products);
        self.work.insert(self.host, end);
        self.host = end;
    }

    /// Returns when a copy ends that starts no earlier than `ready`.
    fn take_link(&mut self, ready: f64, seconds: f64) -> f64 {
        let end_of = |start| self.work.end_beside(start, seconds, self.sharing.copies);
        let (start, end) = self.link.gap(ready, end_of);
        self.link.insert(start, end);
        self.copy_busy += end - start;
        end
    }

    /// The host waits for everything on a stream, all of which has run.
    pub(crate) fn synchronize(&mut self, stream: usize, latency: f64) {
        assert!(self.streams[stream].open.is_empty(), "everything before a synchronisation has run");
        let waits = std::mem::take(&mut self.streams[stream].blocking).max(1);
        self.wait_until(stream, self.streams[stream].time, latency * f64::from(waits));
    }

    /// The host waits for an event recorded on a stream, before which everything has run. Returns whether it had to: an
    /// event that was reached before takes no time.
    pub(crate) fn synchronize_moment(&mut self, stream: usize, moment: Moment, latency: f64) -> bool {
        let time = self.moments[moment.0];
        assert!(time.is_some(), "everything before an event that is waited for has run");
        let time = time.unwrap_or(0.0);
        let waits = time > self.host;
        self.wait_until(stream, time, if waits { latency } else { 0.0 });
        waits
    }

    /// A wait for something already waited for takes no time.
    fn wait_until(&mut self, stream: usize, time: f64, latency: f64) {
        if time > self.streams[stream].seen {
            self.streams[stream].seen = time;
            self.host = self.host.max(time) + latency;
        }
    }

    /// Starts again at zero; everything submitted has run.
    pub(crate) fn reset(&mut self) {
        (self.host, self.copy_busy, self.compute_busy) = (0.0, 0.0, 0.0);
        (self.link, self.work) = Default::default();
        for clock in &mut self.streams {
            assert!(clock.open.is_empty(), "everything before a reset has run");
            (clock.time, clock.seen, clock.blocking) = (0.0, 0.0, 0);
        }
        self.moments.fill(Some(0.0));
    }

    fn submit(&mut self, stream: usize, step: Step) {
        self.streams[stream].open.push_back(Entry { submitted: self.host, step });
        self.settle_stream(stream);
    }

    fn settle(&mut self) {
        while (0..self.streams.len()).any(|stream| self.settle_stream(stream)) {}
    }

    /// Settles as much of one stream as possible; returns whether other streams may go on.
    fn settle_stream(&mut self, stream: usize) -> bool {
        let mut recorded = false;
        while let Some(&Entry { submitted, step }) = self.streams[stream].open.front() {
            let start = self.streams[stream].time.max(submitted);
            let end = match step {
                Step::Copy { seconds } => self.take_link(start, seconds),
                Step::Graph(graph) => match self.graphs[graph.0] {
                    Some(seconds) => {
                        self.compute_busy += seconds;
                        start + seconds
                    }
                    None => break,
                },
                Step::Record(moment) => {
                    self.moments[moment.0] = Some(start);
                    recorded = true;
                    start
                }
                Step::Wait(moment) => match self.moments[moment.0] {
                    Some(time) => start.max(time),
                    None => break,
                },
            };
            let clock = &mut self.streams[stream];
            clock.time = end;
            clock.open.pop_front();
        }
        recorded
    }
}

/// When something is busy: intervals in order, none touching the next.
#[derive(Default)]
struct Busy {
    taken: Vec<(f64, f64)>,
}

impl Busy {
    /// The first gap no earlier than `ready` that is long enough, given the end for each start.
    fn gap(&self, ready: f64, end_of: impl Fn(f64) -> f64) -> (f64, f64) {
        let mut start = ready;
        let next = self.taken.partition_point(|&(_, end)| end <= ready);
        for &(from, to) in &self.taken[next..] {
            if end_of(start) <= from {
                break;
            }
            start = start.max(to);
        }
        (start, end_of(start))
    }

    /// Adds an interval in a gap.
    fn insert(&mut self, start: f64, end: f64) {
        let next = self.taken.partition_point(|&(from, _)| from < start);
        let touches_before = next > 0 && self.taken[next - 1].1 >= start;
        let touches_after = self.taken.get(next).is_some_and(|&(from, _)| from <= end);
        match (touches_before, touches_after) {
            (true, true) => {
                self.taken[next - 1].1 = self.taken[next].1;
                self.taken.remove(next);
            }
            (true, false) => self.taken[next - 1].1 = end,
            (false, true) => self.taken[next].0 = start,
            (false, false) => self.taken.insert(next, (start, end)),
        }
    }

    /// When something ends that takes `seconds` alone and is slowed down to `rate` while this is busy.
    fn end_beside(&self, start: f64, seconds: f64, rate: f64) -> f64 {
        if rate >= 1.0 {
            return start + seconds;
        }
        let (mut time, mut left) = (start, seconds);
        let next = self.taken.partition_point(|&(_, end)| end <= start);
        for &(from, to) in &self.taken[next..] {
            if time + left <= from {
                break;
            }
            left -= (from - time).max(0.0);
            time = time.max(from);
            if left <= (to - time) * rate {
                return time + left / rate;
            }
            left -= (to - time) * rate;
            time = to;
        }
        time + left
    }
}

#[cfg(test)]
mod tests {
    use super::{Schedule, Sharing};
    use crate::Options;

    #[test]
    fn a_waiting_graph_starts_when_its_copy_ends() {
        let mut schedule = Schedule::default();
        let (compute, copies) = (schedule.stream(), schedule.stream());
        schedule.copy(copies, 3.0);
        let landed = schedule.record(copies);
        let first = schedule.graph(compute);
        schedule.wait(compute, landed);
        let second = schedule.graph(compute);
        schedule.graph_done(first, 1.0);
        schedule.graph_done(second, 1.0);
        schedule.synchronize(compute, 0.0);
        assert_eq!((schedule.host, schedule.copy_busy, schedule.compute_busy), (4.0, 3.0, 2.0));
    }

    #[test]
    fn an_event_behind_a_graph_settles_when_the_graph_has_run() {
        let mut schedule = Schedule::default();
        let (compute, copies) = (schedule.stream(), schedule.stream());
        let graph = schedule.graph(compute);
        let used = schedule.record(compute);
        schedule.wait(copies, used);
        schedule.copy(copies, 1.0);
        schedule.graph_done(graph, 5.0);
        schedule.synchronize(copies, 0.0);
        assert_eq!(schedule.host, 6.0);
    }

    #[test]
    fn copies_of_all_streams_and_of_the_host_share_the_link() {
        let mut schedule = Schedule::default();
        let (one, two) = (schedule.stream(), schedule.stream());
        schedule.copy(one, 2.0);
        schedule.copy(two, 2.0);
        schedule.host_copy(1.0, 0.0);
        assert_eq!(schedule.host, 5.0);
        schedule.synchronize(two, 0.0);
        assert_eq!(schedule.host, 5.0, "it ended at 4");
    }

    #[test]
    fn a_copy_settled_late_takes_a_gap_it_fits_in() {
        let mut schedule = Schedule::default();
        let (compute, copies) = (schedule.stream(), schedule.stream());
        let graph = schedule.graph(compute);
        schedule.copy(compute, 1.0);
        schedule.copy(copies, 1.0);
        schedule.host = 10.0;
        schedule.copy(copies, 1.0);
        schedule.graph_done(graph, 2.0);
        let done = schedule.record(compute);
        schedule.host = 0.0;
        schedule.synchronize_moment(compute, done, 0.0);
        assert_eq!(schedule.host, 10.0, "the record itself was submitted at 10; the copy ran from 2 to 3");
        assert_eq!(schedule.link.taken, [(0.0, 1.0), (2.0, 3.0), (10.0, 11.0)]);
    }

    #[test]
    fn host_work_hides_what_was_submitted_before_it() {
        let mut schedule = Schedule::default();
        let copies = schedule.stream();
        schedule.copy(copies, 1.0);
        schedule.host += 4.0;
        schedule.synchronize(copies, 0.0);
        assert_eq!(schedule.host, 4.0);
        schedule.copy(copies, 1.0);
        schedule.synchronize(copies, 0.0);
        assert_eq!(schedule.host, 5.0, "a copy starts no earlier than it is submitted");
    }

    #[test]
    fn each_wait_for_something_new_costs_its_latency() {
        let mut schedule = Schedule::default();
        let copies = schedule.stream();
        schedule.copy(copies, 1.0);
        let landed = schedule.record(copies);
        schedule.synchronize_moment(copies, landed, 0.5);
        schedule.synchronize(copies, 0.5);
        assert_eq!(schedule.host, 1.5, "the second wait finds nothing new");
        schedule.copy(copies, 1.0);
        let landed = schedule.record(copies);
        schedule.host += 1.5;
        assert!(!schedule.synchronize_moment(copies, landed, 0.5));
        assert_eq!(schedule.host, 3.0, "the event was reached at 2.5");
        schedule.blocking_copy(copies, 1.0);
        schedule.blocking_copy(copies, 1.0);
        schedule.synchronize(copies, 0.5);
        assert_eq!(schedule.host, 6.0, "two copies, and a wait for each");
        schedule.host_copy(1.0, 0.5);
        assert_eq!(schedule.host, 7.5);
    }

    #[test]
    fn copies_and_products_share_host_memory() {
        let mut schedule = Schedule { sharing: Sharing { copies: 0.5, products: 0.25 }, ..Schedule::default() };
        let (compute, copies) = (schedule.stream(), schedule.stream());
        schedule.copy(copies, 4.0);
        schedule.host_work(2.0);
        assert_eq!(schedule.host, 5.0, "a quarter of its speed until the copy ends at 4, then all of it");
        // This copy is settled after the products it overlaps.
        let graph = schedule.graph(compute);
        schedule.copy(compute, 4.0);
        schedule.host_work(4.0);
        schedule.graph_done(graph, 1.0);
        schedule.synchronize(compute, 0.0);
        assert_eq!(schedule.host, 11.5, "half its speed from 6 to 9, then all of it");
        assert_eq!(schedule.copy_busy, 9.5, "4 and 5.5");
        schedule.reset();
        schedule.host_work(1.0);
        assert_eq!(schedule.host, 1.0);
    }

    #[test]
    fn one_reader_gets_what_the_other_leaves() {
        let options =
            Options { link_bandwidth: 32.0, host_bandwidth: 64.0, host_memory_bandwidth: 80.0, ..Options::default() };
        assert_eq!(Sharing::of(&options), Sharing { copies: 0.5, products: 0.75 });
        assert_eq!(Sharing::of(&Options::default()), Sharing::default());
        let wide = Options { host_memory_bandwidth: 96.0, ..options.clone() };
        assert_eq!(Sharing::of(&wide), Sharing::default());
        let narrow = Options { host_memory_bandwidth: 64.0, ..options };
        assert_eq!(Sharing::of(&narrow), Sharing { copies: 0.05, products: 0.5 });
    }
}
