//! Which read starts next: pure bookkeeping, no store and no clock.

use std::collections::VecDeque;

use super::{LoadClass, LoaderOptions};
use crate::store::ReadRequest;

/// Reads waiting by class, and what is in flight.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: [VecDeque<ReadRequest>; LoadClass::COUNT],
    in_flight: Vec<InFlight>,
    bytes_in_flight: u64,
}

#[derive(Clone, Copy, Debug)]
struct InFlight {
    ticket: u64,
    class: LoadClass,
    bytes: u64,
}

impl Queue {
    /// Lets a read wait; gives it back when `max_waiting` of its class do already.
    pub fn push(&mut self, class: LoadClass, request: ReadRequest, max_waiting: usize) -> Result<(), ReadRequest> {
        let waiting = &mut self.waiting[class.index()];
        if waiting.len() >= max_waiting {
            return Err(request);
        }
        waiting.push_back(request);
        Ok(())
    }

    /// Moves the reads that may start now from waiting to in flight: at least one when nothing is in flight, so that an
    /// answer always follows and starts the next.
    pub fn start(&mut self, options: &LoaderOptions) -> Vec<ReadRequest> {
        let mut started = Vec::new();
        while self.in_flight.len() < options.max_in_flight_requests
            && self.bytes_in_flight < options.max_in_flight_bytes
        {
            let may_start =
                |class: &LoadClass| !self.waiting[class.index()].is_empty() && self.may_start(*class, options);
            let Some(class) = LoadClass::ALL.into_iter().find(may_start) else { break };
            let Some(request) = self.waiting[class.index()].pop_front() else { break };
            let bytes = request.bytes();
            self.in_flight.push(InFlight { ticket: request.ticket, class, bytes });
            self.bytes_in_flight += bytes;
            started.push(request);
        }
        started
    }

    fn may_start(&self, class: LoadClass, options: &LoaderOptions) -> bool {
        let of_class = self.in_flight.iter().filter(|read| read.class == class);
        match class {
            LoadClass::Upgrade => of_class.count() < options.max_in_flight_upgrades,
            LoadClass::Prefetch | LoadClass::Fill => {
                let is_waited_for = self.in_flight.iter().any(|read| !read.class.is_background());
                !is_waited_for && of_class.map(|read| read.bytes).sum::<u64>() < options.max_in_flight_prefetch_bytes
            }
            LoadClass::OnDemandHigh | LoadClass::OnDemandLow | LoadClass::ReadAhead => true,
        }
    }

    /// Notes an answer; tells the class of the read.
    ///
    /// # Panics
    /// When the ticket is not in flight: the store has broken its contract.
    pub fn finish(&mut self, ticket: u64) -> LoadClass {
        let place = self.in_flight.iter().position(|read| read.ticket == ticket);
        let read = self.in_flight.swap_remove(place.expect("a store answers each request once"));
        self.bytes_in_flight -= read.bytes;
        read.class
    }

    /// Takes out waiting reads of a class; returns their tickets in order.
    pub fn withdraw(&mut self, class: LoadClass, mut unwanted: impl FnMut(u64) -> bool) -> Vec<u64> {
        let mut tickets = Vec::new();
        self.waiting[class.index()].retain(|request| {
            let withdraw = unwanted(request.ticket);
            if withdraw {
                tickets.push(request.ticket);
            }
            !withdraw
        });
        tickets
    }

    /// Moves waiting background reads that are less urgent than `to` behind its own, in order, as long as fewer than
    /// `max_waiting` wait there; returns how many. A read for a free slot that has started changes its class, too.
    pub fn promote(&mut self, mut needed: impl FnMut(u64) -> bool, to: LoadClass, max_waiting: usize) -> usize {
        let mut moved = Vec::new();
        let mut room = max_waiting.saturating_sub(self.waiting[to.index()].len());
        for from in LoadClass::ALL.into_iter().filter(|from| from.is_background() && *from > to) {
            for request in std::mem::take(&mut self.waiting[from.index()]) {
                if room > 0 && needed(request.ticket) {
                    room -= 1;
                    moved.push(request);
                } else {
                    self.waiting[from.index()].push_back(request);
                }
            }
        }
        for read in self.in_flight.iter_mut().filter(|read| read.class == LoadClass::Fill) {
            if needed(read.ticket) {
                read.class = to;
            }
        }
        let n_moved = moved.len();
        self.waiting[to.index()].extend(moved);
        n_moved
    }

    pub fn waiting(&self) -> usize {
        self.waiting.iter().map(VecDeque::len).sum()
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Reads that the consumer may wait for: not those for free slots.
    pub fn expected(&self) -> usize {
        let fills = self.in_flight.iter().filter(|read| read.class == LoadClass::Fill).count();
        self.outstanding() - self.waiting[LoadClass::Fill.index()].len() - fills
    }

    pub fn outstanding(&self) -> usize {
        self.waiting() + self.in_flight()
    }
}
