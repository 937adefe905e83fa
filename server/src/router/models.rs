//! Which models are loaded, and which one is unloaded for another.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use hobbit_core::plan::Budget;
use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::sync::{Mutex as Turn, Notify, OwnedMutexGuard, Semaphore, broadcast, oneshot};

use super::list::{self, Entry};
use super::presets::Presets;
use super::{Given, process, watch};
use crate::app::App;
use crate::error::ApiError;
use crate::ids::random_id;
use crate::json::shortened;
use crate::lock;
use hobbit_common::signals;
use hobbit_programs::log::{Level, Log};

/// Beyond --shutdown-grace, the time that a process has to end before it is killed.
const PATIENCE: Duration = Duration::from_secs(10);

/// Clients of `/models/sse`; another one takes the place of the oldest.
const LISTENERS_MAX: usize = 64;

/// Models of the Hub that are fetched at once: a slow server keeps no other from being asked.
const PULLS_MAX: usize = 4;

/// Events that a client of `/models/sse` may be behind; a slower one misses the oldest.
const EVENTS_BEHIND: usize = 256;

/// All models, loaded and not.
pub struct Models {
    pub app: Arc<App>,
    pub given: Given,
    pub log: Log,
    runtime: Handle,
    program: PathBuf,
    flags: Vec<OsString>,
    pub presets: Presets,
    state: Mutex<State>,
    /// Models are loaded one after another.
    turn: Arc<Turn<()>>,
    /// Each has a model of the Hub fetched.
    pub pulling: Arc<Semaphore>,
    /// The state changed.
    changed: Notify,
}

#[derive(Default)]
struct State {
    listed: BTreeMap<String, Entry>,
    running: BTreeMap<String, Running>,
    /// Why models ended that should not have, and their exit codes.
    failed: BTreeMap<String, (String, Option<i32>)>,
    next_id: u64,
    is_ending: bool,
    /// Requests that wait for a model.
    n_waiting: usize,
    /// To clients of `/models/sse`; `None` once the server ends.
    events: Option<broadcast::Sender<Value>>,
    /// Dropped to end a client's stream; oldest first.
    listeners: VecDeque<oneshot::Sender<()>>,
}

impl State {
    /// Tells clients of `/models/sse` the new status of a model.
    fn tell(&self, name: &str, status: &Value) {
        let event = json!({"model": name, "event": "model_status", "data": status});
        // An error means that no client listens.
        self.events.iter().for_each(|events| drop(events.send(event.clone())));
    }
}

/// A model's process.
struct Running {
    /// Tells it from earlier processes of the same model.
    id: u64,
    /// `None` before it has started, and from its end on.
    pid: Option<u32>,
    /// `None` while it loads.
    address: Option<SocketAddr>,
    key: String,
    n_requests: usize,
    last_used: Instant,
    /// Takes no new requests, and ends after its last one.
    is_leaving: bool,
    /// The model for which it leaves; it stays if that one waits too long.
    leaves_for: Option<String>,
    /// Why it was killed.
    fault: Option<String>,
}

/// A request that waits for a model, as counted.
struct Waiting<'a>(&'a Models);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).n_waiting -= 1;
    }
}

/// A request's use of a loaded model.
pub struct Lease {
    models: Arc<Models>,
    pub name: String,
    id: u64,
    pub address: SocketAddr,
    pub key: String,
    /// Whether it counts as use: looking at a model does not keep it in memory.
    counts: bool,
}

impl Lease {
    /// Why the process of a connection that broke off has ended, for whose end it waits a moment.
    pub async fn why_broken(&self) -> Option<String> {
        let ended = async {
            loop {
                let changed = self.models.changed.notified();
                if let Some(why) = self.models.why_ended(&self.name, self.id) {
                    return why;
                }
                changed.await;
            }
        };
        tokio::time::timeout(Duration::from_secs(2), ended).await.ok()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = lock(&self.models.state);
        if let Some(running) = state.running.get_mut(&self.name).filter(|running| running.id == self.id) {
            running.n_requests -= 1;
            if self.counts {
                running.last_used = Instant::now();
            }
            if running.is_leaving {
                self.models.end_if_idle(&self.name, running);
            }
        }
        drop(state);
        self.models.changed.notify_waiters();
    }
}

impl Models {
    pub fn new(given: Given, budget: Budget, app: Arc<App>, log: Log, runtime: Handle) -> Result<Arc<Self>> {
        let program = std::env::current_exe().context("finding this program's file")?;
        let flags = process::common_flags(&given.words, budget, given.verbosity);
        let presets = given.args.models_preset.as_deref().map(|file| Presets::read(file, &flags)).transpose()?;
        let presets = presets.unwrap_or_default();
        let state = Mutex::new(State { events: Some(broadcast::channel(EVENTS_BEHIND).0), ..State::default() });
        Ok(Arc::new(Self {
            app,
            given,
            log,
            runtime,
            program,
            flags,
            presets,
            state,
            turn: Arc::default(),
            pulling: Arc::new(Semaphore::new(PULLS_MAX)),
            changed: Notify::new(),
        }))
    }

    /// The models that there are now.
    pub fn listed(&self) -> BTreeMap<String, Entry> {
        let directory = self.given.args.models_dir.as_deref().unwrap_or("".as_ref());
        let mut listed = list::scan(directory, &self.given.places);
        self.presets.add_to(&mut listed);
        lock(&self.state).listed.clone_from(&listed);
        listed
    }

    /// The model of that name.
    pub fn find(&self, name: &str) -> Result<Entry, ApiError> {
        let known = list::find(&lock(&self.state).listed, name).cloned();
        known.or_else(|| list::find(&self.listed(), name).cloned()).ok_or_else(|| {
            ApiError::not_found(format!("model '{}' not found; GET /v1/models lists them", shortened(name)))
        })
    }

    /// The model for a request that names none: the one that was used last, or the only one.
    pub fn usual(&self) -> Result<String, ApiError> {
        let last = {
            let state = lock(&self.state);
            let loaded = state.running.iter().filter(|(_, running)| !running.is_leaving);
            loaded.max_by_key(|(_, running)| running.last_used).map(|(name, _)| name.clone())
        };
        let only = || Some(self.listed()).filter(|listed| listed.len() == 1)?.into_keys().next();
        last.or_else(only).ok_or_else(|| ApiError::invalid("model name is missing from the request"))
    }

    /// A model as lists have it.
    pub fn described(&self, entry: &Entry) -> Value {
        let state = lock(&self.state);
        let running = state.running.get(&entry.name);
        let mut status = json!({"value": match running {
            None => "unloaded",
            Some(running) if running.address.is_none() => "loading",
            Some(_) => "loaded",
        }});
        if let Some((_, code)) = state.failed.get(&entry.name).filter(|_| running.is_none()) {
            status["failed"] = true.into();
            status["exit_code"] = (*code).into();
        }
        json!({
            "id": entry.name, "object": "model", "created": entry.modified, "owned_by": "llamacpp",
            "path": entry.file, "size": entry.bytes, "status": status,
        })
    }

    /// Events of all models from now on, and what ends when the client has to leave for others.
    pub fn events(&self) -> Result<(broadcast::Receiver<Value>, oneshot::Receiver<()>), ApiError> {
        let mut state = lock(&self.state);
        let events = state.events.as_ref().map(broadcast::Sender::subscribe).ok_or_else(ApiError::shutting_down)?;
        state.listeners.retain(|listener| !listener.is_closed());
        if state.listeners.len() >= LISTENERS_MAX {
            state.listeners.pop_front();
        }
        let (listener, place) = oneshot::channel();
        state.listeners.push_back(listener);
        Ok((events, place))
    }

    /// The loaded models, and the time since the last use of each.
    pub fn loaded(&self) -> Vec<(String, Duration)> {
        let state = lock(&self.state);
        let loaded = state.running.iter().filter(|(_, running)| running.address.is_some() && !running.is_leaving);
        loaded.map(|(name, running)| (name.clone(), running.last_used.elapsed())).collect()
    }

    /// The model for a request, once it is loaded. `counts`: the request is a use of it.
    ///
    /// # Errors
    /// Too many requests wait; or others do not give way within --model-wait. A model that loads has all its time.
    pub async fn lease(self: &Arc<Self>, name: &str, counts: bool) -> Result<Lease, ApiError> {
        if let Some(lease) = self.lease_now(name, counts)? {
            return Ok(lease);
        }
        let _waiting = self.wait()?;
        let until = tokio::time::Instant::now() + self.given.args.model_wait;
        // Requests have their turns in the order in which they came.
        let mut turn = pin!(Arc::clone(&self.turn).lock_owned());
        loop {
            let changed = self.changed.notified();
            if let Some(lease) = self.lease_now(name, counts)? {
                return Ok(lease);
            }
            tokio::select! {
                turn = &mut turn => {
                    // A client that leaves does not stop what others may wait for.
                    let loading = tokio::spawn(Arc::clone(self).load(name.to_owned(), counts, until, turn));
                    return loading.await.map_err(|error| ApiError::server(error.to_string()))?;
                }
                () = changed => {}
                () = tokio::time::sleep_until(until), if !self.is_loading(name) => return Err(self.no_room(name)),
            }
        }
    }

    /// Counts a request that waits for a model.
    fn wait(&self) -> Result<Waiting<'_>, ApiError> {
        let mut state = lock(&self.state);
        let n_max = self.app.settings.slots.max_waiting as usize;
        if state.n_waiting >= n_max {
            return Err(ApiError::busy(format!("{n_max} requests wait for models already (--max-waiting)")));
        }
        state.n_waiting += 1;
        Ok(Waiting(self))
    }

    fn is_loading(&self, name: &str) -> bool {
        let state = lock(&self.state);
        state.running.get(name).is_some_and(|running| running.address.is_none() && !running.is_leaving)
    }

    /// A request has waited --model-wait for others to leave. They stay.
    fn no_room(&self, name: &str) -> ApiError {
        let mut state = lock(&self.state);
        let mut holds = Vec::new();
        for (holder, running) in &mut state.running {
            let does = match running.address {
                None => "is loading".to_owned(),
                Some(_) => format!("has {} running requests", running.n_requests),
            };
            holds.push(format!("'{holder}' {does}"));
            if running.leaves_for.take_if(|other| other == name).is_some() && running.n_requests > 0 {
                running.is_leaving = false;
            }
        }
        drop(state);
        self.changed.notify_waiters();
        let (seconds, holds) = (self.given.args.model_wait.as_secs_f64(), holds.join(", "));
        ApiError::unavailable(format!(
            "model '{name}' was not loaded: it waited {seconds} s for memory that others use (--models-max, \
             --model-wait): {holds}"
        ))
    }

    fn lease_now(self: &Arc<Self>, name: &str, counts: bool) -> Result<Option<Lease>, ApiError> {
        let mut state = lock(&self.state);
        if state.is_ending {
            return Err(ApiError::shutting_down());
        }
        let Some(running) = state.running.get_mut(name).filter(|running| !running.is_leaving) else { return Ok(None) };
        let Some(address) = running.address else { return Ok(None) };
        running.n_requests += 1;
        let (models, name, key) = (Arc::clone(self), name.to_owned(), running.key.clone());
        Ok(Some(Lease { models, name, id: running.id, address, key, counts }))
    }

    /// Makes room for a model, if others leave in time, and starts it.
    async fn load(
        self: Arc<Self>,
        name: String,
        counts: bool,
        until: tokio::time::Instant,
        _turn: OwnedMutexGuard<()>,
    ) -> Result<Lease, ApiError> {
        loop {
            let changed = self.changed.notified();
            if self.make_room(&name) {
                break;
            }
            if tokio::time::timeout_at(until, changed).await.is_err() {
                return Err(self.no_room(&name));
            }
        }
        if let Some(lease) = self.lease_now(&name, counts)? {
            return Ok(lease);
        }
        let entry = self.find(&name)?;
        let key = random_id();
        let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let bound = socket.and_then(|socket| socket.local_addr().map(|address| (socket, address)));
        let (socket, address) = bound.map_err(|error| ApiError::server(format!("no port for '{name}': {error}")))?;
        let command = process::command(&self.program, &self.presets.of(&name), &self.flags, &entry, &key, socket);
        let id = self.begin(&name, key);
        let (models, attended) = (Arc::clone(&self), name.clone());
        let attend = move || process::attend(&models, &attended, id, command);
        if let Err(error) = std::thread::Builder::new().name("model".to_owned()).spawn(attend) {
            self.ended(&name, error.to_string(), None);
        }
        tokio::spawn(watch::watch(Arc::clone(&self), name.clone(), id, address));
        loop {
            let changed = self.changed.notified();
            if let Some(lease) = self.lease_now(&name, counts)? {
                return Ok(lease);
            }
            if let Some(why) = self.why_ended(&name, id) {
                return Err(ApiError::unavailable(format!("model '{name}' was not loaded: {why}")));
            }
            changed.await;
        }
    }

    /// Whether the model may be started, or runs. If not, the model that was used least recently is asked to leave: an
    /// idle one if there is one.
    fn make_room(self: &Arc<Self>, name: &str) -> bool {
        let mut state = lock(&self.state);
        match state.running.get(name) {
            Some(running) => return !running.is_leaving,
            None if state.running.len() < usize::from(self.given.args.models_max) || state.is_ending => return true,
            None => {}
        }
        if !state.running.values().any(|running| running.is_leaving) {
            let oldest =
                state.running.iter_mut().min_by_key(|(_, running)| (running.n_requests > 0, running.last_used));
            if let Some((oldest, running)) = oldest {
                (running.is_leaving, running.leaves_for) = (true, Some(name.to_owned()));
                self.end_if_idle(oldest, running);
            }
        }
        false
    }

    fn begin(&self, name: &str, key: String) -> u64 {
        let mut state = lock(&self.state);
        state.next_id += 1;
        state.failed.remove(name);
        let id = state.next_id;
        let running = Running {
            id,
            pid: None,
            address: None,
            key,
            n_requests: 0,
            last_used: Instant::now(),
            is_leaving: false,
            leaves_for: None,
            fault: None,
        };
        state.running.insert(name.to_owned(), running);
        state.tell(name, &json!({"status": "loading"}));
        id
    }

    /// Asks a model to leave; returns whether it was there, and not asked before.
    pub fn leave(self: &Arc<Self>, name: &str) -> bool {
        let mut state = lock(&self.state);
        let found = state.running.get_mut(name).filter(|running| !running.is_leaving || running.leaves_for.is_some());
        let Some(running) = found else { return false };
        (running.is_leaving, running.leaves_for) = (true, None);
        self.end_if_idle(name, running);
        true
    }

    /// Ends the process of an idle model.
    fn end_if_idle(self: &Arc<Self>, name: &str, running: &Running) {
        let Some(pid) = running.pid.filter(|_| running.n_requests == 0) else { return };
        signals::send(pid, signals::SIGTERM);
        let (models, name, id) = (Arc::clone(self), name.to_owned(), running.id);
        let patience = self.app.settings.http.shutdown_grace + PATIENCE;
        self.runtime.spawn(async move {
            tokio::time::sleep(patience).await;
            models.signal(signals::SIGKILL, |of, running| of == name && running.id == id);
        });
    }

    fn signal(&self, number: i32, to: impl Fn(&str, &Running) -> bool) {
        let state = lock(&self.state);
        let processes = state.running.iter().filter(|(name, running)| to(name, running));
        processes.filter_map(|(_, running)| running.pid).for_each(|pid| signals::send(pid, number));
    }

    /// Changes the process `id` of a model, if it is there, and tells its new status, if it has one.
    fn change(&self, name: &str, id: u64, status: Option<&str>, change: impl FnOnce(&mut Running)) {
        let mut state = lock(&self.state);
        if let Some(running) = state.running.get_mut(name).filter(|running| running.id == id) {
            change(running);
            status.iter().for_each(|status| state.tell(name, &json!({"status": status})));
        }
        drop(state);
        self.changed.notify_waiters();
    }

    pub fn started(self: &Arc<Self>, name: &str, id: u64, pid: u32) {
        let mut state = lock(&self.state);
        let is_ending = state.is_ending;
        if let Some(running) = state.running.get_mut(name).filter(|running| running.id == id) {
            running.pid = Some(pid);
            if running.is_leaving || is_ending {
                self.end_if_idle(name, running);
            }
        }
    }

    pub fn is_ready(&self, name: &str, id: u64, address: SocketAddr) {
        self.change(name, id, Some("loaded"), |running| running.address = Some(address));
    }

    /// Whether the process `id` of a model should answer: it is there, and was not asked to end.
    pub fn should_answer(&self, name: &str, id: u64) -> bool {
        let state = lock(&self.state);
        let running = state.running.get(name).filter(|running| running.id == id && !state.is_ending);
        running.is_some_and(|running| !running.is_leaving || running.n_requests > 0)
    }

    /// Kills the process `id` of a model, which does not answer.
    pub fn kill(&self, name: &str, id: u64, why: String) {
        self.change(name, id, None, |running| running.fault = Some(why));
        self.signal(signals::SIGKILL, |of, running| of == name && running.id == id);
    }

    /// The process may be gone: it gets no signals any more.
    pub fn is_gone(&self, name: &str, id: u64) {
        self.change(name, id, None, |running| running.pid = None);
    }

    pub fn ended(&self, name: &str, why: String, code: Option<i32>) {
        let mut state = lock(&self.state);
        if let Some(running) = state.running.remove(name)
            && !(running.is_leaving && running.n_requests == 0 || state.is_ending)
        {
            let why = running.fault.unwrap_or(why);
            self.log.line(Level::Error, format!("error: model '{name}' has ended ({why})"));
            state.failed.insert(name.to_owned(), (why, code));
        }
        state.tell(name, &json!({"status": "unloaded", "exit_code": code}));
        drop(state);
        self.changed.notify_waiters();
    }

    /// Why the process `id` of a model has ended, if it has.
    fn why_ended(&self, name: &str, id: u64) -> Option<String> {
        let state = lock(&self.state);
        if state.running.get(name).is_some_and(|running| running.id == id) {
            return None;
        }
        Some(state.failed.get(name).map_or_else(|| "it was unloaded".to_owned(), |(why, _)| why.clone()))
    }

    /// Unloads models that were not used for --sleep-idle-seconds. Never returns.
    pub async fn unload_idle(self: Arc<Self>) {
        let Ok(seconds) = u64::try_from(self.given.args.sleep_idle_seconds) else { return };
        let mut ticks = tokio::time::interval(Duration::from_millis(500));
        loop {
            ticks.tick().await;
            let idle = Duration::from_secs(seconds);
            let mut state = lock(&self.state);
            let done = |running: &&mut Running| {
                let is_idle = running.address.is_some() && running.n_requests == 0;
                is_idle && !running.is_leaving && running.last_used.elapsed() >= idle
            };
            let idle = state.running.iter_mut().filter_map(|(name, running)| Some((name, Some(running).filter(done)?)));
            for (name, running) in idle {
                running.is_leaving = true;
                self.end_if_idle(name, running);
            }
        }
    }

    /// Begins nothing new, and asks all processes to end: their streams have --shutdown-grace.
    pub fn end(&self) {
        let mut state = lock(&self.state);
        (state.is_ending, state.events) = (true, None);
        drop(state);
        // Others have the signal; a second one would end them at once.
        self.signal(signals::SIGTERM, |_, running| !running.is_leaving || running.n_requests > 0);
        self.changed.notify_waiters();
    }

    /// Waits for the end of all processes.
    pub fn wait_for_end(&self) {
        let end = Instant::now() + self.app.settings.http.shutdown_grace + PATIENCE;
        while !lock(&self.state).running.is_empty() {
            if Instant::now() >= end {
                self.signal(signals::SIGKILL, |_, _| true);
            }
            std::thread::sleep(crate::LOOK);
        }
    }
}
