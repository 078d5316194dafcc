//! Who comes to a port without belonging to the job, for tests.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// More than what a stranger is listened to.
const LIMIT: Duration = Duration::from_secs(30);

fn greeting(version: u16, rest: &[&[u8]]) -> Vec<u8> {
    [b"zerocomm", &version.to_le_bytes()[..], &[7; 32], &rest.concat()].concat()
}

/// What strangers say.
fn words() -> Vec<Vec<u8>> {
    vec![
        Vec::new(),
        b"zeroco".to_vec(),
        b"GET / HTTP/1.1\r\nHost: zero\r\n\r\n".to_vec(),
        (0..10_000).map(|index| (index * index % 251) as u8).collect(),
        greeting(2, &[]),
        greeting(1, &[]),
        greeting(1, &[&u32::MAX.to_le_bytes()]),
        greeting(1, &[&7_u32.to_le_bytes(), b"control", &[0; 32]]),
    ]
}

/// Connects to `address` as strangers do.
pub(crate) fn visit(address: SocketAddr) -> Vec<TcpStream> {
    words()
        .iter()
        .map(|words| {
            let mut stream = TcpStream::connect(address).unwrap();
            // It may be shown the door before it has said all.
            let _ = stream.write_all(words);
            stream
        })
        .collect()
}

/// Expects that the other side ends all connections by itself; returns what it said on each.
pub(crate) fn are_shown_the_door(streams: Vec<TcpStream>) -> Vec<Vec<u8>> {
    streams
        .into_iter()
        .map(|mut stream| {
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            let mut told = Vec::new();
            match stream.read_to_end(&mut told) {
                Ok(_) => {}
                Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
            }
            told
        })
        .collect()
}
