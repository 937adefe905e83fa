//! Downloads from URLs, whose files may change.

use super::*;

/// A server whose files may change: name, bytes, etag.
type Shelf = Arc<Mutex<Vec<(&'static str, Vec<u8>, &'static str)>>>;

fn shelf(files: &[(&'static str, Vec<u8>, &'static str)]) -> (Server, Shelf) {
    let shelf: Shelf = Arc::new(Mutex::new(files.to_vec()));
    let files = Arc::clone(&shelf);
    let server = Server::new(move |request| {
        let files = files.lock().unwrap();
        match files.iter().find(|(name, ..)| request.path == *name) {
            Some((_, bytes, etag)) => Reply::file(request, bytes, etag),
            None => Reply::new(404, "no"),
        }
    });
    (server, shelf)
}

#[test]
fn a_file_is_fetched_once_and_again_when_it_changed() {
    let (one, two) = (model(1, 5000), model(2, 6000));
    let (server, shelf) = shelf(&[("/m.gguf?x=1", one.clone(), "\"1\"")]);
    let rig = Rig::new(server.url(""));
    let url = server.url("/m.gguf?x=1");
    let path = rig.mu(&url).unwrap();
    assert_eq!(fs::read(&path).unwrap(), one);
    assert!(path.starts_with(&rig.places.urls) && path.ends_with("m.gguf"), "{}", path.display());
    assert!(rig.memory.notes().contains("only its length was checked"));
    let methods = || server.seen().iter().map(|request| request.method.clone()).collect::<Vec<_>>();
    assert_eq!(methods(), ["HEAD", "GET"]);
    assert_eq!(rig.mu(&url).unwrap(), path);
    assert_eq!(methods(), ["HEAD"]);
    shelf.lock().unwrap()[0] = ("/m.gguf?x=1", two.clone(), "\"2\"");
    assert_eq!(fs::read(rig.mu(&url).unwrap()).unwrap(), two);
    assert_eq!(methods(), ["HEAD", "GET"]);
    // A cached file suffices if the server does not answer.
    shelf.lock().unwrap().clear();
    assert_eq!(fs::read(rig.mu(&url).unwrap()).unwrap(), two);
    drop(server);
    let offline = Rig { places: Places { offline: true, ..rig.places.clone() }, ..rig };
    assert_eq!(offline.mu(&url).unwrap(), path);
    assert!(offline.mu("http://h/other.gguf").unwrap_err().contains("run once without --offline"));
}

#[test]
fn only_a_part_of_the_same_file_is_resumed() {
    let (one, two) = (model(1, 50_000), model(2, 50_000));
    for (etag, then, then_etag, resumes) in
        [("\"1\"", &one, "\"1\"", true), ("\"1\"", &two, "\"2\"", false), ("W/\"1\"", &one, "W/\"1\"", false)]
    {
        let state = Arc::new(Mutex::new((one.clone(), etag, true)));
        let server = Server::new({
            let state = Arc::clone(&state);
            move |request| {
                let (bytes, etag, breaks) = state.lock().unwrap().clone();
                let sent = if !breaks {
                    usize::MAX
                } else if request.from().is_none() {
                    20_000
                } else {
                    0
                };
                Reply::file(request, &bytes, etag).breaking_off_after(sent)
            }
        });
        let rig = Rig::new(server.url(""));
        let url = server.url("/m.gguf");
        assert!(rig.mu(&url).unwrap_err().contains("broke off"));
        *state.lock().unwrap() = (then.clone(), then_etag, false);
        server.seen();
        assert!(fs::read(rig.mu(&url).unwrap()).unwrap() == *then);
        let seen = server.seen();
        let expected = if resumes { (Some(20_000), Some(etag)) } else { (None, None) };
        assert_eq!((seen[1].from(), seen[1].header("if-range")), expected, "{etag} {then_etag}");
    }
}

#[test]
fn a_file_that_changes_meanwhile_comes_with_its_new_length() {
    // The first connection ends in the middle, or before any byte of the file.
    for (new, sent) in [(model(2, 60_000), 20_000), (model(2, 40_000), 20_000), (model(2, 60_000), 0)] {
        let old = model(1, 50_000);
        let server = Server::new({
            let new = new.clone();
            let gets = AtomicUsize::new(0);
            move |request| match (request.method.as_str(), gets.load(Ordering::SeqCst)) {
                ("HEAD", 0) => Reply::file(request, &old, "\"1\""),
                ("GET", 0) => {
                    gets.store(1, Ordering::SeqCst);
                    Reply::file(request, &old, "\"1\"").breaking_off_after(sent)
                }
                _ => Reply::file(request, &new, "\"2\""),
            }
        });
        let rig = Rig::new(server.url(""));
        let url = server.url("/m.gguf");
        assert_eq!(fs::read(rig.mu(&url).unwrap()).unwrap(), new);
        server.seen();
        assert_eq!(fs::read(rig.mu(&url).unwrap()).unwrap(), new);
        assert_eq!(server.seen().len(), 1, "the new etag is kept");
    }
}

#[test]
fn a_url_of_the_hub_is_checked_as_the_hub_says() {
    let bytes = model(1, 5000);
    let sum = Arc::new(Mutex::new(sha256(&bytes)));
    let cdn = Server::new({
        let bytes = bytes.clone();
        move |request| match request.method.as_str() {
            "HEAD" => Reply::new(403, "signed for GET"),
            _ => Reply::file(request, &bytes, "\"cdn\""),
        }
    });
    let target = cdn.url("/x");
    let server = Server::new({
        let sum = Arc::clone(&sum);
        move |_| {
            let etag = format!("\"{}\"", sum.lock().unwrap());
            Reply::redirect(&target).with("x-linked-etag", &etag).with("x-linked-size", "5000")
        }
    });
    let rig = Rig::new("http://127.0.0.1:1".into());
    let url = server.url("/a/b/resolve/main/m.gguf");
    let path = rig.mu(&url).unwrap();
    assert!(!rig.memory.notes().contains("no SHA-256"), "{}", rig.memory.notes());
    cdn.seen();
    assert_eq!(rig.mu(&url).unwrap(), path);
    assert_eq!(cdn.seen().len(), 0, "it has not changed");
    *sum.lock().unwrap() = "a".repeat(64);
    assert!(rig.mu(&url).unwrap_err().contains("its SHA-256 is "));
    assert_eq!(fs::read(&path).unwrap(), bytes, "what was here stays");
}

#[test]
fn a_file_of_unknown_length_is_refused() {
    let bytes = model(1, 50_000);
    let whole = Server::new({
        let bytes = bytes.clone();
        move |_| Reply::new(200, bytes.clone()).without_length()
    });
    // A part, of which the rest comes as a range of nothing that is known.
    let rest = Server::new(move |request| match request.from() {
        None => Reply::file(request, &bytes, "\"1\"").breaking_off_after(20_000),
        Some(from) => Reply::new(206, &bytes[from..]).without_length().with("content-range", "bytes 20000-/*"),
    });
    let rig = Rig::new(whole.url(""));
    let error = rig.mu(&whole.url("/m.gguf")).unwrap_err();
    assert!(error.contains("m.gguf: the server does not say how long this file is") && error.contains("-m"), "{error}");
    assert!(!rig.files().iter().any(|file| file.contains("m.gguf") && !file.ends_with(".lock")), "{:?}", rig.files());
    assert_eq!(whole.seen().len(), 2, "it is not tried again");
    // The length was known from the first answer.
    rig.mu(&rest.url("/m.gguf")).unwrap();
}

#[test]
fn a_server_that_begins_again_and_again_is_given_up() {
    const REQUESTS_MAX: usize = 200;
    let bytes = model(1, 4 << 20);
    let count = Arc::<AtomicUsize>::default();
    for (ranges, why) in [("refused", "(the server began again more than 5 times)"), ("ignored", "")] {
        let (bytes, counted) = (bytes.clone(), Arc::clone(&count));
        let server = Server::new(move |request| match counted.fetch_add(1, Ordering::SeqCst) {
            REQUESTS_MAX.. => Reply::new(404, "this test would go on for ever"),
            _ if ranges == "refused" && request.from().is_some() => {
                Reply::new(416, "").with("content-range", "bytes */1")
            }
            _ => Reply::new(200, bytes.clone()).with("etag", "\"1\"").breaking_off_after(2 << 20),
        });
        let rig = Rig::new(server.url(""));
        let error = rig.mu(&server.url("/m.gguf")).unwrap_err();
        assert!(error.contains("broke off at 2.00 MiB of 4.00 MiB") && error.contains(why), "{ranges}: {error}");
        assert!(count.swap(0, Ordering::SeqCst) < 20, "{ranges}");
    }
}

#[test]
fn a_disk_that_fills_up_ends_a_download() {
    let bytes = model(1, 40 << 20);
    let (server, _) = shelf(&[("/m.gguf", bytes.clone(), "\"1\"")]);
    let rig = Rig::new(server.url(""));
    rig.memory.fills_up_after.set(Some(2));
    let error = rig.mu(&server.url("/m.gguf")).unwrap_err();
    assert!(error.contains("are needed and 0 B are free (64.00 MiB more stay free)"), "{error}");
    let part = rig.files().into_iter().find(|file| file.ends_with(".incomplete")).unwrap();
    let came = fs::metadata(rig.dir.path().join(part)).unwrap().len();
    assert!((16 << 20..40 << 20).contains(&came), "{came}");
    rig.memory.fills_up_after.set(None);
    server.seen();
    assert_eq!(fs::read(rig.mu(&server.url("/m.gguf")).unwrap()).unwrap(), bytes);
    assert_eq!(server.seen()[1].from(), Some(came as usize), "it goes on where the disk was full");
}

#[test]
fn a_server_without_tls_ends_at_once() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let rig = Rig::new(format!("https://{}", listener.local_addr().unwrap()));
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
            while stream.read(&mut [0; 4096]).is_ok_and(|n| n > 0) {}
        }
    });
    let error = rig.hf("a/b").unwrap_err();
    assert!(error.contains("no secure connection to 127.0.0.1 (") && error.contains("check the address"), "{error}");
    assert!(rig.memory.pauses.borrow().is_empty(), "{}", rig.memory.notes());
}
