//! Downloads from correct, faulty and hostile servers.

mod server;
mod urls;

use std::cell::{Cell, RefCell};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::json;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use super::*;
use server::{Reply, Request, Server};

/// Records all notes and never waits.
#[derive(Default)]
struct Memory {
    notes: RefCell<Vec<String>>,
    pauses: RefCell<Vec<u64>>,
    /// Called instead of a pause.
    instead: RefCell<Option<Box<dyn FnOnce()>>>,
    /// Questions about it after which the disk is full.
    fills_up_after: Cell<Option<u32>>,
    has_left: Cell<bool>,
    /// Seconds that pass before each look at the clock.
    seconds_between: Cell<u64>,
    clock: Cell<Option<Instant>>,
}

impl Memory {
    fn notes(&self) -> String {
        self.notes.borrow().join("\n")
    }
}

impl Witness for Memory {
    fn note(&self, text: &str) {
        self.notes.borrow_mut().push(text.to_owned());
    }
    fn begin(&self, _: &str, _: Option<u64>, _: u64) {}
    fn at(&self, _: u64) {}
    fn end(&self) {}
    fn now(&self) -> Instant {
        let last = self.clock.get().unwrap_or_else(Instant::now);
        self.clock.set(Some(last + Duration::from_secs(self.seconds_between.get())));
        last
    }
    fn pause(&self, time: Duration) {
        self.pauses.borrow_mut().push(time.as_secs());
        if let Some(instead) = self.instead.borrow_mut().take() {
            instead();
        }
    }
    fn is_wanted(&self) -> bool {
        !self.has_left.get()
    }
    fn free_space(&self, _: &Path) -> std::io::Result<u64> {
        let Some(left) = self.fills_up_after.get() else { return Ok(1 << 40) };
        self.fills_up_after.set(Some(left.saturating_sub(1)));
        Ok(if left == 0 { 0 } else { 1 << 40 })
    }
}

/// A cache of a test's own, for a server that stands for the Hub.
struct Rig {
    dir: TempDir,
    places: Places,
    memory: Memory,
}

impl Rig {
    fn new(endpoint: String) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (hub, urls) = (dir.path().join("hub"), dir.path().join("urls"));
        Self { places: Places { endpoint, hub, urls, token: None, offline: false }, memory: Memory::default(), dir }
    }

    fn hf(&self, repo: &str) -> Result<std::path::PathBuf, String> {
        self.fetch(&Source::repo(repo, None).unwrap())
    }

    fn mu(&self, url: &str) -> Result<std::path::PathBuf, String> {
        self.fetch(&Source::Url(url.to_owned()))
    }

    fn fetch(&self, source: &Source) -> Result<std::path::PathBuf, String> {
        fetch(source, &self.places, &self.memory).map_err(|error| error.to_string())
    }

    /// Every file and link below the caches, in order.
    fn files(&self) -> Vec<String> {
        fn walk(directory: &Path, root: &Path, found: &mut Vec<String>) {
            for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
                if entry.file_type().unwrap().is_dir() {
                    walk(&entry.path(), root, found)
                } else {
                    found.push(entry.path().strip_prefix(root).unwrap().display().to_string())
                }
            }
        }
        let mut found = Vec::new();
        walk(self.dir.path(), self.dir.path(), &mut found);
        found.sort();
        found
    }
}

/// A file that passes for a model.
fn model(seed: u8, bytes: usize) -> Vec<u8> {
    let noise = (0..bytes).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) as u8 ^ seed);
    b"GGUF".iter().copied().chain(noise.skip(4)).collect()
}

fn sha256(bytes: &[u8]) -> String {
    hobbit_core::pack::Sha256(Sha256::digest(bytes).into()).to_string()
}

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const API: &str = "/api/models/a/b/revision/main?blobs=true";

/// The Hub's listing of a repository with these files.
fn listing(files: &[(&str, &[u8])]) -> Reply {
    let sibling = |(name, bytes): &(&str, &[u8])| {
        let lfs = json!({"sha256": sha256(bytes), "size": bytes.len()});
        json!({"rfilename": name, "size": bytes.len(), "blobId": "f".repeat(40), "lfs": lfs})
    };
    let siblings: Vec<_> = files.iter().map(sibling).collect();
    Reply::new(200, json!({"sha": COMMIT, "siblings": siblings}).to_string())
}

/// A Hub with one repository, `a/b`, of these files; `twist` may answer requests for files instead.
fn hub(files: &[(&'static str, Vec<u8>)], twist: impl Fn(&Request, &[u8]) -> Option<Reply> + Send + 'static) -> Server {
    let files = files.to_vec();
    Server::new(move |request| {
        let named: Vec<(&str, &[u8])> = files.iter().map(|(name, bytes)| (*name, &bytes[..])).collect();
        if request.path == API {
            return listing(&named);
        }
        let name = request.path.strip_prefix(&format!("/a/b/resolve/{COMMIT}/"));
        match named.iter().find(|(known, _)| Some(*known) == name) {
            Some((_, bytes)) => twist(request, bytes).unwrap_or_else(|| Reply::file(request, bytes, "\"x\"")),
            None => Reply::new(404, "no such file"),
        }
    })
}

fn plain(files: &[(&'static str, Vec<u8>)]) -> Server {
    hub(files, |_, _| None)
}

fn rig(server: &Server) -> Rig {
    Rig::new(server.url(""))
}

/// A download from `a/b`, which has only `m.gguf`; `twist` may answer requests for it.
fn fetched(
    bytes: &[u8],
    twist: impl Fn(&Request, &[u8]) -> Option<Reply> + Send + 'static,
) -> (Rig, Server, Result<Vec<u8>, String>) {
    let server = hub(&[("m.gguf", bytes.to_vec())], twist);
    let rig = rig(&server);
    let found = rig.hf("a/b").map(|path| fs::read(path).unwrap());
    (rig, server, found)
}

#[test]
fn a_model_comes_into_the_hubs_own_layout() {
    let (q4, q8) = (model(1, 5000), model(2, 9000));
    let server = plain(&[("README.md", b"words".to_vec()), ("m-Q4_K_M.gguf", q4.clone()), ("m-Q8_0.gguf", q8.clone())]);
    let rig = rig(&server);
    let path = rig.hf("a/b").unwrap();
    let snapshot = rig.places.hub.join(format!("models--a--b/snapshots/{COMMIT}"));
    assert_eq!(path, snapshot.join("m-Q4_K_M.gguf"));
    assert_eq!(fs::read(&path).unwrap(), q4);
    assert_eq!(fs::read_link(&path).unwrap(), Path::new("../../blobs").join(sha256(&q4)));
    assert_eq!(fs::read_to_string(rig.places.hub.join("models--a--b/refs/main")).unwrap(), COMMIT);
    assert_eq!(rig.files().len(), 4, "{:?}", rig.files()); // blob, link, ref, lock
    assert_eq!(server.seen().len(), 2);
    // A cached file is not fetched again and needs no server.
    assert_eq!(rig.hf("a/b:q4_k_m").unwrap(), path);
    assert_eq!(server.seen().iter().map(|request| &*request.path).collect::<Vec<_>>(), [API]);
    assert_eq!(fs::read(rig.hf("a/b:Q8_0").unwrap()).unwrap(), q8);
    drop(server);
    let offline = Rig { places: Places { offline: true, ..rig.places.clone() }, ..rig };
    assert_eq!(offline.hf("a/b").unwrap(), path);
    let error = offline.hf("a/b:Q2_K").unwrap_err();
    assert!(error.contains("there are Q4_K_M, Q8_0") && error.contains("without --offline"), "{error}");
    assert!(offline.hf("a/c").unwrap_err().contains("nothing was fetched yet"));
}

#[test]
fn files_of_the_hubs_own_client_are_used() {
    let bytes = model(1, 100);
    let server = plain(&[("Q8_0/m-Q8_0.gguf", bytes.clone())]);
    let rig = rig(&server);
    let blob = rig.places.hub.join("models--a--b/blobs").join(sha256(&bytes));
    fs::create_dir_all(blob.parent().unwrap()).unwrap();
    fs::write(&blob, &bytes).unwrap();
    let path = rig.hf("a/b").unwrap();
    assert_eq!(server.seen().len(), 1, "only the listing: the blob is there");
    assert_eq!(fs::read_link(&path).unwrap(), Path::new("../../../blobs").join(sha256(&bytes)));
    // A truncated blob does not count.
    fs::write(&blob, &bytes[..50]).unwrap();
    rig.hf("a/b").unwrap();
    assert_eq!(fs::read(&path).unwrap(), bytes);
}

#[test]
fn a_broken_connection_is_resumed() {
    let bytes = model(3, 100_000);
    let breaks = Mutex::new(vec![1000, 20_000, 0, 100]);
    let (rig, server, found) = fetched(&bytes, move |request, bytes| {
        let sent = breaks.lock().unwrap().pop()?;
        Some(Reply::file(request, bytes, "\"x\"").breaking_off_after(sent))
    });
    assert!(found.unwrap() == bytes);
    let ranges: Vec<_> = server.seen().iter().skip(1).map(Request::from).collect();
    assert_eq!(ranges, [None, Some(100), Some(100), Some(20_100), Some(21_100)]);
    assert_eq!(*rig.memory.pauses.borrow(), [1, 2, 4, 8]);
    assert!(rig.memory.notes().contains("broke off at 100 B"), "{}", rig.memory.notes());
    // Tries with progress are not counted.
    let bytes = model(3, 16 << 20);
    let (rig, _, found) =
        fetched(&bytes, |request, bytes| Some(Reply::file(request, bytes, "\"x\"").breaking_off_after(2 << 20)));
    assert!(found.unwrap() == bytes);
    assert_eq!(*rig.memory.pauses.borrow(), [1; 7]);
}

#[test]
fn a_server_that_drips_is_given_up() {
    let bytes = model(4, 50_000);
    let server = hub(&[("m.gguf", bytes.clone())], |request, bytes| {
        let sent = if request.from().is_some() { 1 } else { 30_000 };
        Some(Reply::file(request, bytes, "\"x\"").breaking_off_after(sent))
    });
    let rig = rig(&server);
    rig.memory.seconds_between.set(60);
    let error = rig.hf("a/b").unwrap_err();
    assert!(error.contains("came in 60 s"), "{error}");
    assert!(rig.memory.notes().contains("only 29.30 KiB came in 60 s"), "{}", rig.memory.notes());
}

#[test]
fn a_server_that_answers_without_end_is_given_up() {
    for (begin, drip) in [("", "HTTP/1.1 102 .\r\n\r\n"), ("HTTP/1.1 200 .\r\ncontent-length: 99999999\r\n\r\n", " ")] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            assert!(stream.read(&mut [0; 4096]).unwrap() > 0);
            stream.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
            let mut sent = stream.write_all(begin.as_bytes());
            while sent.is_ok() && !matches!(stream.read(&mut [0]), Ok(0)) {
                sent = stream.write_all(drip.as_bytes());
            }
        });
        let rig = Rig::new(endpoint);
        let web = web::Web::within(&rig.places, Duration::from_millis(200));
        let url = format!("{}/", rig.places.endpoint);
        let error = web.json::<serde_json::Value>(&url, "a/b", 1, &rig.memory).unwrap_err().to_string();
        assert!(error.contains("timeout"), "{error}");
        server.join().unwrap();
    }
}

#[test]
fn the_next_run_resumes() {
    let bytes = model(4, 50_000);
    let is_down = Arc::new(Mutex::new(true));
    let server = hub(&[("m.gguf", bytes.clone())], {
        let is_down = Arc::clone(&is_down);
        move |request, bytes| {
            let sent = if request.from().is_some() { 0 } else { 30_000 };
            is_down.lock().unwrap().then(|| Reply::file(request, bytes, "\"x\"").breaking_off_after(sent))
        }
    });
    let rig = rig(&server);
    let error = rig.hf("a/b").unwrap_err();
    assert!(error.contains("broke off at 29.30 KiB of 48.83 KiB") && error.contains("run again"), "{error}");
    let part = rig.places.hub.join(format!("models--a--b/blobs/{}.incomplete", sha256(&bytes)));
    assert_eq!(fs::read(&part).unwrap(), bytes[..30_000]);
    assert!(!rig.files().iter().any(|file| file.contains("refs") || file.contains("snapshots")), "{:?}", rig.files());
    *is_down.lock().unwrap() = false;
    server.seen();
    assert_eq!(fs::read(rig.hf("a/b").unwrap()).unwrap(), bytes);
    assert_eq!(server.seen().iter().filter_map(Request::from).collect::<Vec<_>>(), [30_000]);
    assert!(!part.exists());
}

#[test]
fn an_unusable_part_is_not_taken() {
    let bytes = model(5, 5000);
    let server = plain(&[("m.gguf", bytes.clone())]);
    let rig = rig(&server);
    let part = rig.places.hub.join(format!("models--a--b/blobs/{}.incomplete", sha256(&bytes)));
    fs::create_dir_all(part.parent().unwrap()).unwrap();
    fs::write(&part, model(6, 6000)).unwrap();
    assert_eq!(fs::read(rig.hf("a/b").unwrap()).unwrap(), bytes);
    #[cfg(unix)]
    an_unusual_part_is_not_written(&rig, &part);
}

#[cfg(unix)]
fn an_unusual_part_is_not_written(rig: &Rig, part: &Path) {
    // A link in its place is not followed.
    let victim = rig.dir.path().join("victim");
    fs::write(&victim, "mine").unwrap();
    fs::remove_dir_all(rig.places.hub.join("models--a--b")).unwrap();
    fs::create_dir_all(part.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink(&victim, part).unwrap();
    assert!(rig.hf("a/b").unwrap_err().contains("incomplete: cannot write this part"));
    assert_eq!(fs::read(victim).unwrap(), b"mine");
    // Nor is a pipe waited for.
    fs::remove_file(part).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(part).status().unwrap().success());
    assert!(rig.hf("a/b").unwrap_err().contains("incomplete: cannot write this part"));
}

type Twist = fn(&Request, &[u8]) -> Option<Reply>;

/// Answers to requests for a file of 5000 bytes, and the error; empty if the file arrives all the same.
const FAULTS: &[(&str, Twist, &str)] = &[
    (
        "damaged",
        |request, bytes| {
            let mut other = bytes.to_vec();
            other[4000] ^= 1;
            Some(Reply::file(request, &other, "\"x\""))
        },
        "a/b/m.gguf: its SHA-256 is ",
    ),
    ("shorter", |request, bytes| Some(Reply::file(request, &bytes[..4000], "\"x\"")), "has 4000 bytes, expected 5000"),
    ("endless", |_, bytes| Some(Reply::new(200, [bytes, bytes].concat()).without_length()), "expected 5000"),
    (
        "cut, without a length",
        |request, bytes| request.from().is_none().then(|| Reply::new(200, &bytes[..4500]).without_length()),
        "",
    ),
    (
        "another range",
        |request, bytes| {
            Some(match request.from() {
                None => Reply::file(request, bytes, "\"x\"").breaking_off_after(100),
                Some(_) => Reply::new(206, &bytes[..100]).with("content-range", "bytes 0-99/5000"),
            })
        },
        "another range than was asked for",
    ),
    (
        "no ranges",
        |request, bytes| {
            let sent = if request.from().is_some() { usize::MAX } else { 100 };
            Some(Reply::new(200, bytes).breaking_off_after(sent))
        },
        "",
    ),
    (
        "a page",
        |_, _| Some(Reply::new(200, &"<html>".repeat(1000).as_bytes()[..5000])),
        "no GGUF file (it begins with \"<html>",
    ),
];

#[test]
fn faults_of_servers_are_named_and_leave_no_file() {
    let bytes = model(8, 5000);
    for (name, twist, part) in FAULTS {
        let (rig, _, found) = fetched(&bytes, *twist);
        match found {
            Ok(found) => assert!(part.is_empty() && found == bytes, "{name}"),
            Err(error) => {
                assert!(
                    !part.is_empty() && error.starts_with("a/b/m.gguf: ") && error.contains(part),
                    "{name}: {error}"
                );
                assert!(rig.memory.pauses.borrow().len() <= 1, "{name}: {}", rig.memory.notes());
                assert!(!rig.files().iter().any(|file| file.ends_with("m.gguf")), "{name}: {:?}", rig.files());
            }
        }
    }
    for (target, part) in [("/", "redirects too often"), ("file:///etc/passwd", ""), ("http://[", "")] {
        let twist = move |request: &Request, _: &[u8]| {
            Some(Reply::redirect(if part.is_empty() { target } else { &request.path }))
        };
        let error = fetched(&bytes, twist).2.unwrap_err();
        assert!(error.starts_with("a/b/m.gguf: the server") && error.contains(part), "{target}: {error}");
    }
    for (status, part) in
        [(401, "--hf-token or HF_TOKEN"), (403, "accept its conditions"), (404, "the name"), (400, "400")]
    {
        let error = fetched(&bytes, move |_, _| Some(Reply::new(status, "no"))).2.unwrap_err();
        assert!(error.starts_with("a/b/m.gguf: ") && error.contains(part), "{status}: {error}");
    }
    // A wrong sum leaves only the lock.
    let (rig, ..) = fetched(&bytes, FAULTS[0].1);
    assert_eq!(rig.files().len(), 1, "{:?}", rig.files());
}

#[test]
fn answers_that_are_no_listing() {
    for (status, body, part) in [
        (200, "<html>".to_owned(), "unexpected answer"),
        (200, "[]".to_owned(), "unexpected answer"),
        (200, json!({"sha": "main"}).to_string(), "names no commit"),
        (200, " ".repeat(33 << 20), "unexpected answer"),
        (401, String::new(), "--hf-token or HF_TOKEN"),
        (404, String::new(), "check the name"),
    ] {
        let server = Server::new(move |_| Reply::new(status, body.clone()));
        let error = rig(&server).hf("a/b").unwrap_err();
        assert!(error.starts_with("a/b: ") && error.contains(part), "{error}");
    }
}

#[test]
fn the_token_stays_with_the_endpoint() {
    let bytes = model(9, 5000);
    let cdn = Server::new({
        let bytes = bytes.clone();
        move |request| Reply::file(request, &bytes, "\"cdn\"")
    });
    let target = cdn.url("/blob?signature=1");
    let server = hub(&[("m.gguf", bytes.clone())], move |_, _| Some(Reply::redirect(&target)));
    let mut rig = rig(&server);
    rig.places.token = Some(Token::new("hf_secret").unwrap());
    assert_eq!(fs::read(rig.hf("a/b").unwrap()).unwrap(), bytes);
    let sent = |server: &Server| {
        server.seen().iter().map(|request| request.header("authorization").is_some()).collect::<Vec<_>>()
    };
    assert_eq!(sent(&server), [true, true]);
    assert_eq!(sent(&cdn), [false]);
}

#[test]
fn a_busy_server_is_waited_for() {
    let bytes = model(10, 5000);
    let busy = Mutex::new(vec![(503, "soon"), (503, "99999999"), (429, "7")]);
    let server = hub(&[("m.gguf", bytes.clone())], move |_, _| {
        let (status, wait) = busy.lock().unwrap().pop()?;
        Some(Reply::new(status, "later").with("retry-after", wait))
    });
    let rig = rig(&server);
    assert_eq!(fs::read(rig.hf("a/b").unwrap()).unwrap(), bytes);
    assert_eq!(*rig.memory.pauses.borrow(), [7, 60, 4]);
    assert!(rig.memory.notes().contains("it answered 429"), "{}", rig.memory.notes());
}

#[test]
fn the_cache_serves_if_the_hub_is_away() {
    let state = Arc::new(Mutex::new(200));
    let bytes = model(11, 5000);
    let server = Server::new({
        let (state, bytes) = (Arc::clone(&state), bytes.clone());
        move |request| match *state.lock().unwrap() {
            200 if request.path == API => listing(&[("m.gguf", &bytes)]),
            200 => Reply::file(request, &bytes, "\"x\""),
            status => Reply::new(status, "away"),
        }
    });
    let rig = rig(&server);
    *state.lock().unwrap() = 503;
    let error = rig.hf("a/b").unwrap_err();
    assert!(error.contains("127.0.0.1 cannot be reached (it answered 503)") && error.contains("--offline"), "{error}");
    assert_eq!(*rig.memory.pauses.borrow(), [1, 2, 4, 8]);
    *state.lock().unwrap() = 200;
    let path = rig.hf("a/b").unwrap();
    *state.lock().unwrap() = 503;
    assert_eq!(rig.hf("a/b").unwrap(), path);
    assert!(rig.memory.notes().contains("taking what is in the cache"), "{}", rig.memory.notes());
    drop(server);
    assert_eq!(rig.hf("a/b").unwrap(), path);
}

#[test]
fn hostile_names_lead_nowhere() {
    let bytes = model(1, 100);
    let names =
        ["../../../m-Q4_K_M.gguf", "/tmp/m-Q4_K_M.gguf", "a\\m-Q4_K_M.gguf", "m-Q4_K_M.gguf\0", "a/../m-Q4_K_M.gguf"];
    for name in names {
        let server = hub(&[(name, bytes.clone())], |_, _| None);
        let rig = rig(&server);
        let error = rig.hf("a/b").unwrap_err();
        assert!(error.contains("no GGUF file of a model"), "{name:?}: {error}");
        assert!(rig.memory.notes().contains("1 names of files lead out of the repository"), "{}", rig.memory.notes());
        assert!(rig.fetch(&Source::repo("a/b", Some(name)).unwrap()).is_err());
        assert_eq!(rig.files(), [""; 0], "{name:?}");
    }
    // Names of commits and blobs become paths, too.
    for (commit, blob) in [("../../x", "f"), (COMMIT, "../../../x"), (COMMIT, "/etc/x")] {
        let server = Server::new(move |request| {
            let file = json!({"rfilename": "m.gguf", "size": 100, "blobId": blob});
            if request.path == API {
                Reply::new(200, json!({"sha": commit, "siblings": [file]}).to_string())
            } else {
                Reply::new(200, model(1, 100)).with("etag", "\"../../y\"")
            }
        });
        let rig = rig(&server);
        assert!(rig.hf("a/b").is_err());
        assert_eq!(rig.files(), [""; 0], "{commit} {blob}");
    }
}

#[test]
fn a_sparse_listing_suffices() {
    let bytes = model(1, 5000);
    let server = Server::new({
        let bytes = bytes.clone();
        move |request| {
            if request.path == API {
                Reply::new(200, json!({"sha": COMMIT, "siblings": [{"rfilename": "m.gguf"}]}).to_string())
            } else {
                Reply::file(request, &bytes, "\"etag-of-a-mirror\"")
            }
        }
    });
    let rig = rig(&server);
    let path = rig.hf("a/b").unwrap();
    assert_eq!(fs::read(&path).unwrap(), bytes);
    assert!(fs::read_link(&path).unwrap().ends_with("etag-of-a-mirror"));
    assert!(rig.memory.notes().contains("only its length was checked"), "{}", rig.memory.notes());
    assert_eq!(server.seen().iter().map(|request| &*request.method).collect::<Vec<_>>(), ["GET", "HEAD", "GET"]);
}

#[test]
fn a_disk_that_is_too_small_is_named_before() {
    let server = Server::new(|_| {
        let file = json!({"rfilename": "m.gguf", "lfs": {"sha256": "a".repeat(64), "size": 1u64 << 60}});
        Reply::new(200, json!({"sha": COMMIT, "siblings": [file]}).to_string())
    });
    let rig = rig(&server);
    let error = rig.hf("a/b").unwrap_err();
    assert!(error.contains("1.00 EiB are needed") && error.contains("HF_HOME"), "{error}");
    assert_eq!(server.seen().len(), 1);
}

#[test]
fn two_processes_do_not_write_at_once() {
    let bytes = model(1, 5000);
    let server = plain(&[("m.gguf", bytes.clone())]);
    let rig = rig(&server);
    let lock = rig.places.hub.join(format!(".locks/models--a--b/{}.lock", sha256(&bytes)));
    fs::create_dir_all(lock.parent().unwrap()).unwrap();
    let held = fs::File::create(&lock).unwrap();
    held.lock().unwrap();
    let blob = rig.places.hub.join("models--a--b/blobs").join(sha256(&bytes));
    // The other one is done, and goes.
    *rig.memory.instead.borrow_mut() = Some(Box::new({
        let bytes = bytes.clone();
        move || {
            fs::create_dir_all(blob.parent().unwrap()).unwrap();
            fs::write(&blob, &bytes).unwrap();
            drop(held);
        }
    }));
    assert_eq!(fs::read(rig.hf("a/b").unwrap()).unwrap(), bytes);
    assert!(rig.memory.notes().contains("another process downloads it"), "{}", rig.memory.notes());
    assert_eq!(server.seen().len(), 1, "nothing but the listing was asked for");
}

#[test]
fn an_abandoned_download_stops_and_resumes_later() {
    let bytes = model(1, 700_000);
    let server = plain(&[("m.gguf", bytes.clone())]);
    let rig = rig(&server);
    rig.memory.has_left.set(true);
    let error = rig.hf("a/b").unwrap_err();
    assert!(error.contains("stopped"), "{error}");
    rig.memory.has_left.set(false);
    assert_eq!(fs::read(rig.hf("a/b").unwrap()).unwrap(), bytes);
    let from: Vec<_> = server.seen().iter().filter_map(Request::from).collect();
    assert!(from.len() == 1 && from[0] > 0, "{from:?}");
}

#[test]
fn the_beginning_of_a_file_is_not_kept() {
    let bytes = model(1, 700_000);
    let server = plain(&[("m.gguf", bytes.clone())]);
    let rig = rig(&server);
    let source = Source::repo("a/b", None).unwrap();
    assert_eq!(beginning(&source, &rig.places, 1000, &rig.memory).unwrap(), bytes[..1000]);
    assert_eq!(beginning(&source, &rig.places, 1 << 20, &rig.memory).unwrap(), bytes);
    assert!(rig.files().is_empty());
}
