//! Which read starts next: pure bookkeeping, no store and no clock.

use std::collections::VecDeque;

use super::{LoadClass, LoaderOptions};
use crate::store::ReadRequest;

/// Reads waiting by class, and what is in flight.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: [VecDeque<ReadRequest>; 2],
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
    pub fn push(&mut self, class: LoadClass, request: ReadRequest) {
        self.waiting[class as usize].push_back(request);
    }

    /// Moves the reads that may start now from waiting to in flight: at least one when nothing is in flight.
    pub fn start(&mut self, options: &LoaderOptions) -> Vec<ReadRequest> {
        let mut started = Vec::new();
        while self.in_flight.len() < options.max_in_flight_requests
            && self.bytes_in_flight < options.max_in_flight_bytes
        {
            let next = [LoadClass::OnDemand, LoadClass::Prefetch]
                .into_iter()
                .find_map(|class| Some((class, self.waiting[class as usize].pop_front()?)));
            let Some((class, request)) = next else { break };
            let bytes = request.extent.len;
            self.in_flight.push(InFlight { ticket: request.ticket, class, bytes });
            self.bytes_in_flight += bytes;
            started.push(request);
        }
        started
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
        self.waiting[class as usize].retain(|request| {
            let withdraw = unwanted(request.ticket);
            if withdraw {
                tickets.push(request.ticket);
            }
            !withdraw
        });
        tickets
    }

    /// Moves waiting prefetches behind the on-demand reads, in order; returns how many.
    pub fn promote(&mut self, mut needed: impl FnMut(u64) -> bool) -> usize {
        let [on_demand, prefetch] = &mut self.waiting;
        let before = on_demand.len();
        for request in std::mem::take(prefetch) {
            let class = if needed(request.ticket) { &mut *on_demand } else { &mut *prefetch };
            class.push_back(request);
        }
        on_demand.len() - before
    }

    pub fn waiting(&self) -> usize {
        self.waiting.iter().map(VecDeque::len).sum()
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    pub fn outstanding(&self) -> usize {
        self.waiting() + self.in_flight()
    }
}
