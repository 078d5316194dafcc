//! The client of PyTorch's store, against a store made here and against servers that misbehave.

use std::collections::HashMap;
use std::error::Error as _;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use zero_comm::{TorchStore, TorchStoreError};

/// Long enough for anything that is to succeed.
const LONG: Duration = Duration::from_secs(60);

/// Short enough to wait for in vain.
const SHORT: Duration = Duration::from_millis(100);

/// Nobody listens at the address that an error of connecting shows.
const REFUSED: io::ErrorKind = io::ErrorKind::ConnectionRefused;

/// A store for any number of clients, which keeps what the protocol says and panics at anything else.
struct Store {
    port: u16,
}

#[derive(Default)]
struct Shelf {
    values: Mutex<HashMap<Vec<u8>, Vec<u8>>>,
    changed: Condvar,
}

impl Store {
    fn serve() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let shelf = Arc::new(Shelf::default());
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, shelf) = (stream.unwrap(), Arc::clone(&shelf));
                thread::spawn(move || shelf.talk(stream));
            }
        });
        Self { port }
    }

    fn client(&self, patience: Duration) -> TorchStore {
        TorchStore::connect("127.0.0.1", self.port, patience).unwrap()
    }
}

impl Shelf {
    fn talk(&self, mut stream: TcpStream) {
        assert_eq!(take::<5>(&mut stream), Some([0, 0xce, 0xf7, 0x85, 0x3c]));
        while let Some([query]) = take(&mut stream) {
            match query {
                1 => {
                    let (key, value) = (text(&mut stream), text(&mut stream));
                    self.values.lock().unwrap().insert(key, value);
                    self.changed.notify_all();
                }
                3 => {
                    let value =
                        self.values.lock().unwrap().get(&text(&mut stream)).cloned().unwrap_or_default();
                    let answer = [&(value.len() as u64).to_le_bytes(), value.as_slice()].concat();
                    stream.write_all(&answer).unwrap();
                }
                5 | 6 => {
                    assert_eq!(take::<8>(&mut stream), Some(1_u64.to_le_bytes()));
                    let key = text(&mut stream);
                    let mut values = self.values.lock().unwrap();
                    while query == 6 && !values.contains_key(&key) {
                        values = self.changed.wait(values).unwrap();
                    }
                    // Who has given up does not read it.
                    let _ = stream.write_all(&[u8::from(!values.contains_key(&key))]);
                }
                other => panic!("query {other}"),
            }
        }
    }
}

fn take<const N: usize>(stream: &mut TcpStream) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).ok().map(|()| bytes)
}

fn text(stream: &mut TcpStream) -> Vec<u8> {
    let length = u64::from_le_bytes(take(stream).unwrap());
    let mut bytes = vec![0; usize::try_from(length).unwrap()];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// A server that reads `request` bytes after the greeting, sends `answer` and then closes, or stays silent until
/// the client goes away.
fn rogue(request: usize, answer: &'static [u8], close: bool) -> (u16, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut bytes = vec![0; 5 + request];
        stream.read_exact(&mut bytes).unwrap();
        stream.write_all(answer).unwrap();
        if !close {
            let mut rest = Vec::new();
            // A client that closes with unread bytes resets the connection.
            let _ = stream.read_to_end(&mut rest);
        }
    });
    (port, server)
}

/// The length of a request about the key `key`, by the number of bytes before the key.
const fn about(header: usize) -> usize {
    header + 8 + "/key".len()
}

const WAIT: usize = about(1 + 8);
const GET: usize = about(1);

#[test]
fn what_is_set_can_be_got_by_others() {
    let store = Store::serve();
    let mut first = store.client(LONG);
    let mut second = store.client(LONG);
    let long: Vec<u8> = (0..1 << 20).map(|byte: u32| byte.to_le_bytes()[0]).collect();
    for (key, value) in
        [("a", b"10.0.0.1:80".to_vec()), ("empty", Vec::new()), ("", b"b".to_vec()), ("long", long)]
    {
        first.set(key, &value).unwrap();
        assert_eq!(second.get(key).unwrap(), value, "{key}");
    }
    first.set("a", b"again").unwrap();
    assert_eq!(second.get("a").unwrap(), b"again");
}

#[test]
fn getting_waits_until_another_sets() {
    let store = Store::serve();
    let (mut reader, mut writer) = (store.client(LONG), store.client(LONG));
    thread::scope(|scope| {
        let read = scope.spawn(move || reader.get("key"));
        writer.set("key", b"value").unwrap();
        assert_eq!(read.join().unwrap().unwrap(), b"value");
    });
}

#[test]
fn a_key_that_nobody_sets_is_waited_for_until_the_deadline() {
    let store = Store::serve();
    let error = store.client(SHORT).get("zero/address").unwrap_err();
    assert!(matches!(error, TorchStoreError::Timeout { .. }), "{error}");
    let text = error.to_string();
    for part in ["127.0.0.1", &store.port.to_string(), "\"zero/address\"", "100ms", "rank 0"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn where_nobody_listens_is_said_at_the_deadline() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    for patience in [Duration::ZERO, SHORT] {
        let error = TorchStore::connect("127.0.0.1", port, patience).unwrap_err();
        let TorchStoreError::Unreachable { address, after, source } = &error else { panic!("{error}") };
        assert_eq!((address.as_str(), *after), (format!("127.0.0.1:{port}").as_str(), patience));
        assert_eq!(source.kind(), REFUSED);
    }
}

#[test]
fn a_store_that_starts_late_is_found() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    thread::scope(|scope| {
        let client = scope.spawn(move || TorchStore::connect("127.0.0.1", address.port(), LONG).map(drop));
        let listener = TcpListener::bind(address).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        assert_eq!(take::<5>(&mut stream), Some([0, 0xce, 0xf7, 0x85, 0x3c]));
        client.join().unwrap().unwrap();
    });
}

#[test]
fn a_hostile_answer_is_refused_and_ends_the_connection() {
    let cases: [(usize, &'static [u8], &str); 5] = [
        // A length beyond all memory, one just beyond the limit, and text of another protocol.
        (WAIT + GET, &[0, 255, 255, 255, 255, 255, 255, 255, 255], "18446744073709551615 bytes"),
        (WAIT + GET, &[0, 1, 0, 16, 0, 0, 0, 0, 0], "1048577 bytes"),
        (WAIT + GET, b"\0HTTP/1.1 400 Bad Request", "bytes"),
        (WAIT, b"HTTP/1.1 400 Bad Request", "the byte 72"),
        (WAIT, &[1], "the byte 1"),
    ];
    for (request, answer, said) in cases {
        // The server of the long requests answers the first of them with the first byte.
        let (port, server) = if request > WAIT { split_rogue(answer) } else { rogue(request, answer, false) };
        let mut store = TorchStore::connect("127.0.0.1", port, LONG).unwrap();
        let error = store.get("key").unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, TorchStoreError::BadAnswer { .. }), "{text}");
        for part in [said, &format!("127.0.0.1:{port}"), "\"key\""] {
            assert!(text.contains(part), "{part}: {text}");
        }
        server.join().unwrap();
        let after = store.set("key", b"value").unwrap_err();
        assert!(matches!(after, TorchStoreError::Lost { .. }), "{after}");
    }
}

/// A server that answers the wait for `key` with the first byte, and the get with the rest.
fn split_rogue(answer: &'static [u8]) -> (u16, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 5 + WAIT]).unwrap();
        stream.write_all(&answer[..1]).unwrap();
        stream.read_exact(&mut [0; GET]).unwrap();
        stream.write_all(&answer[1..]).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    });
    (port, server)
}

#[test]
fn a_server_that_closes_early_is_an_error_of_its_own() {
    for answer in [&[][..], &[0]] {
        let (port, server) = rogue(WAIT, answer, true);
        let error = TorchStore::connect("127.0.0.1", port, LONG).unwrap().get("key").unwrap_err();
        assert!(matches!(error, TorchStoreError::Lost { .. }), "{error}");
        assert!(error.source().is_some() && error.to_string().contains("\"key\""), "{error}");
        server.join().unwrap();
    }
}

#[test]
fn a_value_that_breaks_off_is_no_value() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 5 + WAIT]).unwrap();
        stream.write_all(&[0]).unwrap();
        stream.read_exact(&mut [0; GET]).unwrap();
        stream.write_all(&[5, 0, 0, 0, 0, 0, 0, 0, b'a', b'b']).unwrap();
    });
    let error = TorchStore::connect("127.0.0.1", port, LONG).unwrap().get("key").unwrap_err();
    assert!(matches!(error, TorchStoreError::Lost { query: "get", .. }), "{error}");
    server.join().unwrap();
}

#[test]
fn a_server_that_never_answers_is_left_at_the_deadline() {
    let (port, server) = rogue(WAIT, &[], false);
    let error = TorchStore::connect("127.0.0.1", port, SHORT).unwrap().wait("key").unwrap_err();
    assert!(matches!(error, TorchStoreError::Timeout { query: "wait", .. }), "{error}");
    server.join().unwrap();

    let request = about(1) + 8 + "value".len() + WAIT;
    let (port, server) = rogue(request, &[], false);
    let error = TorchStore::connect("127.0.0.1", port, SHORT).unwrap().set("key", b"value").unwrap_err();
    assert!(matches!(error, TorchStoreError::Timeout { query: "set", .. }), "{error}");
    server.join().unwrap();
}

#[test]
fn what_is_too_long_is_refused_before_it_is_sent() {
    let store = Store::serve();
    let mut client = store.client(LONG);
    let long = "k".repeat(1 << 20);
    for error in [
        client.set("key", &vec![0; (1 << 20) + 1]).unwrap_err(),
        client.set(&long, b"").unwrap_err(),
        client.get(&long).unwrap_err(),
    ] {
        assert!(matches!(error, TorchStoreError::TooLong { length: 1_048_577, .. }), "{error}");
        assert!(error.to_string().len() < 300);
    }
    client.set("key", b"value").unwrap();
    assert_eq!(client.get("key").unwrap(), b"value");
}

#[test]
fn an_address_that_an_earlier_run_left_is_looked_up_again() {
    let store = Store::serve();
    let (mut reader, mut writer) = (store.client(LONG), store.client(LONG));
    writer.set("address", b"old").unwrap();
    let mut tried = Vec::new();
    let found = reader.find("address", |address, left| {
        assert!(left <= LONG);
        tried.push(address.to_owned());
        if address == "new" {
            return Ok(address.to_owned());
        }
        writer.set("address", b"new").unwrap();
        Err(io::Error::from(REFUSED))
    });
    assert_eq!(found.unwrap(), "new");
    assert_eq!(tried, ["old", "new"]);
}

#[test]
fn an_address_where_nobody_answers_is_named() {
    let store = Store::serve();
    let mut client = store.client(Duration::from_secs(2));
    client.set("address", b"10.0.0.1:80 and-a-secret").unwrap();
    let error = client.find("address", |_, _| Err::<(), _>(io::Error::from(REFUSED))).unwrap_err();
    let TorchStoreError::NobodyAnswers { found, key, .. } = &error else { panic!("{error}") };
    assert_eq!((found.as_str(), key.as_str()), ("10.0.0.1:80", "address"));
    assert_eq!(error.source().unwrap().to_string(), io::Error::from(REFUSED).to_string());
    let text = error.to_string();
    assert!(text.contains(&io::Error::from(REFUSED).to_string()) && !text.contains("secret"), "{text}");

    let error =
        store.client(SHORT).find("nothing", |_, _| Err::<(), _>(io::Error::from(REFUSED))).unwrap_err();
    assert!(matches!(error, TorchStoreError::Timeout { query: "wait", .. }), "{error}");

    let mut client = store.client(LONG);
    client.set("address", &[0xff]).unwrap();
    let error = client.find("address", |_, _| Err::<(), _>(io::Error::from(REFUSED))).unwrap_err();
    assert!(matches!(error, TorchStoreError::BadAnswer { .. }), "{error}");
}

#[test]
fn for_ever_is_a_patience_too() {
    let store = Store::serve();
    let mut client = store.client(Duration::MAX);
    client.set("key", b"value").unwrap();
    assert_eq!(client.get("key").unwrap(), b"value");
}
