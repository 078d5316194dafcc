//! How two processes find out that they belong to the same job.
//!
//! ```text
//! connecting                                  accepting
//! magic, version, nonce  ──────────────────>
//!                        <──────────────────  magic, version, nonce
//! hello, proof           ──────────────────>
//!                        <──────────────────  accepted?, hello, proof
//! ```
//!
//! Each side says a *hello*, bytes that mean something to whoever uses the handshake. A proof is an
//! HMAC-SHA256 with the job's token over the version, who proves (so that a proof that is sent back proves
//! nothing), both nonces (nor does one that is sent again) and the hellos said so far. Who accepts says
//! nothing that depends on the token before the other has proved that it knows it.
//!
//! Magic and version are the first ten bytes in every version to come.

use std::io::{self, Read, Write};

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::token::Token;

const MAGIC: [u8; 8] = *b"zerocomm";

/// The version of everything said between processes of a job.
pub(crate) const VERSION: u16 = 1;

/// The longest hello.
pub(crate) const MAX_HELLO: usize = 4096;

const NONCE: usize = 32;
const LENGTH: usize = size_of::<u32>();
const PROOF: usize = 32;

const ACCEPTED: u8 = 1;
const REFUSED: u8 = 0;

/// Why a handshake came to nothing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HandshakeError {
    #[error("the peer does not speak this protocol")]
    Stranger,
    #[error("the peer speaks protocol {theirs}, this build speaks {VERSION}; run one build everywhere")]
    Version { theirs: u16 },
    #[error("the peer does not know this job's token")]
    Unproven,
    #[error("the peer does not accept this process's token; give all processes of a job the same")]
    Refused,
    #[error("the peer announced a hello of {0} bytes, at most {MAX_HELLO} are allowed")]
    TooLong(usize),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Shakes hands with whoever connected, and returns the hello of that side.
///
/// `stream` should end its waits, as [`Timed`](super::Timed) does. Nothing is read beyond the handshake.
pub(crate) fn accept(
    stream: &mut (impl Read + Write),
    token: &Token,
    hello: &[u8],
) -> Result<Vec<u8>, HandshakeError> {
    run(Handshake::accept(token, hello)?, stream)
}

/// Shakes hands with whoever accepted, and returns the hello of that side.
///
/// As [`accept`]. What a stranger can learn from it is `hello`.
pub(crate) fn connect(
    stream: &mut (impl Read + Write),
    token: &Token,
    hello: &[u8],
) -> Result<Vec<u8>, HandshakeError> {
    run(Handshake::connect(token, hello)?, stream)
}

fn run(mut handshake: Handshake, stream: &mut (impl Read + Write)) -> Result<Vec<u8>, HandshakeError> {
    let mut input = Vec::new();
    loop {
        stream.write_all(&handshake.output())?;
        input.resize(handshake.wants(), 0);
        stream.read_exact(&mut input)?;
        let step = handshake.take(&input);
        // An error may leave something to say.
        stream.write_all(&handshake.output())?;
        if let Some(hello) = step? {
            return Ok(hello);
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Connect = 1,
    Accept = 2,
}

/// What is waited for.
#[derive(Clone, Copy, Debug)]
enum Stage {
    /// Magic and version.
    Preface,
    /// The peer's nonce.
    Nonce,
    /// Whether the peer accepts this side.
    Answer,
    /// The length of the peer's hello.
    Length,
    /// The peer's hello, of this length, and its proof.
    Proof(usize),
}

/// One side of a handshake, without the stream: it is given exactly the bytes it [`wants`](Self::wants).
pub(super) struct Handshake {
    role: Role,
    stage: Stage,
    token: Token,
    hello: Vec<u8>,
    nonce: [u8; NONCE],
    peer_nonce: [u8; NONCE],
    output: Vec<u8>,
}

impl Handshake {
    pub(super) fn accept(token: &Token, hello: &[u8]) -> io::Result<Self> {
        Self::new(Role::Accept, token, hello)
    }

    fn connect(token: &Token, hello: &[u8]) -> io::Result<Self> {
        let mut handshake = Self::new(Role::Connect, token, hello)?;
        handshake.greet();
        Ok(handshake)
    }

    fn new(role: Role, token: &Token, hello: &[u8]) -> io::Result<Self> {
        if hello.len() > MAX_HELLO {
            let what = format!("a hello of {} bytes is longer than {MAX_HELLO}", hello.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let mut nonce = [0; NONCE];
        getrandom::fill(&mut nonce)?;
        Ok(Self {
            role,
            stage: Stage::Preface,
            token: token.clone(),
            hello: hello.to_vec(),
            nonce,
            peer_nonce: [0; NONCE],
            output: Vec::new(),
        })
    }

    /// How many bytes come next.
    pub(super) const fn wants(&self) -> usize {
        match self.stage {
            Stage::Preface => MAGIC.len() + size_of::<u16>(),
            Stage::Nonce => NONCE,
            Stage::Answer => 1,
            Stage::Length => LENGTH,
            Stage::Proof(hello) => hello + PROOF,
        }
    }

    /// What is to be sent, after an error too.
    pub(super) fn output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// Goes on with the bytes that were wanted, and returns the peer's hello if that was all.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Result<Option<Vec<u8>>, HandshakeError> {
        self.stage = match self.stage {
            Stage::Preface => {
                let (magic, version) = bytes.split_at(MAGIC.len());
                if magic != MAGIC {
                    return Err(HandshakeError::Stranger);
                }
                if self.role == Role::Accept {
                    // Whatever the peer's version is, it can then name both.
                    self.greet();
                }
                match u16::from_le_bytes([version[0], version[1]]) {
                    VERSION => Stage::Nonce,
                    theirs => return Err(HandshakeError::Version { theirs }),
                }
            }
            Stage::Nonce => {
                self.peer_nonce.copy_from_slice(bytes);
                match self.role {
                    Role::Accept => Stage::Length,
                    Role::Connect => {
                        let proof = self.mac(Role::Connect, &[&self.hello]).finalize().into_bytes();
                        self.say(&proof);
                        Stage::Answer
                    }
                }
            }
            Stage::Answer if bytes == [ACCEPTED] => Stage::Length,
            Stage::Answer => return Err(HandshakeError::Refused),
            Stage::Length => match u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize {
                length if length <= MAX_HELLO => Stage::Proof(length),
                length => return Err(HandshakeError::TooLong(length)),
            },
            Stage::Proof(length) => {
                let (hello, proof) = bytes.split_at(length);
                let expected = match self.role {
                    Role::Accept => self.mac(Role::Connect, &[hello]),
                    Role::Connect => self.mac(Role::Accept, &[&self.hello, hello]),
                };
                let proven = expected.verify_slice(proof).is_ok();
                if self.role == Role::Accept {
                    self.output.push(if proven { ACCEPTED } else { REFUSED });
                }
                if !proven {
                    return Err(HandshakeError::Unproven);
                }
                if self.role == Role::Accept {
                    let proof = self.mac(Role::Accept, &[hello, &self.hello]).finalize().into_bytes();
                    self.say(&proof);
                }
                return Ok(Some(hello.to_vec()));
            }
        };
        Ok(None)
    }

    fn greet(&mut self) {
        self.output.extend(MAGIC);
        self.output.extend(VERSION.to_le_bytes());
        self.output.extend(self.nonce);
    }

    fn say(&mut self, proof: &[u8]) {
        self.output.extend((self.hello.len() as u32).to_le_bytes());
        self.output.extend(&self.hello);
        self.output.extend(proof);
    }

    /// The proof of the side in `role`, over the hellos said so far, the connecting side's first.
    fn mac(&self, role: Role, hellos: &[&[u8]]) -> Hmac<Sha256> {
        let (connecting, accepting) = match self.role {
            Role::Connect => (&self.nonce, &self.peer_nonce),
            Role::Accept => (&self.peer_nonce, &self.nonce),
        };
        let mut mac = Hmac::<Sha256>::new_from_slice(self.token.bytes())
            .unwrap_or_else(|_| unreachable!("a key of HMAC has any length"));
        mac.update(&MAGIC);
        mac.update(&VERSION.to_le_bytes());
        mac.update(&[role as u8]);
        mac.update(connecting);
        mac.update(accepting);
        for hello in hellos {
            mac.update(&(hello.len() as u32).to_le_bytes());
            mac.update(hello);
        }
        mac
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::thread;
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::*;
    use crate::control::Timed;

    fn token() -> Token {
        "the token of the tests".parse().unwrap()
    }

    /// What one side says next, given what the other said.
    fn feed(side: &mut Handshake, mut bytes: &[u8]) -> Result<(Vec<u8>, Option<Vec<u8>>), HandshakeError> {
        let mut hello = None;
        while let Some((wanted, rest)) = bytes.split_at_checked(side.wants()).filter(|_| hello.is_none()) {
            hello = side.take(wanted)?;
            bytes = rest;
        }
        Ok((side.output(), hello))
    }

    fn sides() -> (Handshake, Handshake) {
        (Handshake::connect(&token(), b"from").unwrap(), Handshake::accept(&token(), b"to").unwrap())
    }

    #[test]
    fn both_sides_learn_who_the_other_is_and_leave_what_follows() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let limit = Instant::now() + Duration::from_secs(60);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut stream = TcpStream::connect(address).unwrap();
                assert_eq!(connect(&mut Timed::new(&stream, limit), &token(), b"from").unwrap(), b"to");
                stream.write_all(b"payload").unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
            });
            let mut stream = listener.accept().unwrap().0;
            assert_eq!(accept(&mut Timed::new(&stream, limit), &token(), b"to").unwrap(), b"from");
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).unwrap();
            assert_eq!(rest, b"payload");
        });
    }

    #[test]
    fn silence_ends_a_handshake() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut timed = Timed::new(&stream, Instant::now() + Duration::from_millis(20));
        let error = connect(&mut timed, &token(), b"from").unwrap_err();
        assert!(
            matches!(&error, HandshakeError::Io(error) if error.kind() == io::ErrorKind::TimedOut),
            "{error}"
        );
    }

    #[test]
    fn without_the_token_nobody_gets_in() {
        let other = "another token of the tests".parse().unwrap();
        let mut from = Handshake::connect(&other, b"from").unwrap();
        let mut to = Handshake::accept(&token(), b"to").unwrap();
        let greeting = from.output();
        let greeting = feed(&mut to, &greeting).unwrap().0;
        let proof = feed(&mut from, &greeting).unwrap().0;
        assert!(matches!(feed(&mut to, &proof), Err(HandshakeError::Unproven)));
        // Nothing that depends on the token is said to it.
        let answer = to.output();
        assert_eq!(answer, [REFUSED]);
        assert!(matches!(feed(&mut from, &answer), Err(HandshakeError::Refused)));
    }

    #[test]
    fn a_proof_that_is_sent_back_proves_nothing() {
        let (mut from, _) = sides();
        let greeting = from.output();
        let mut answer = vec![ACCEPTED];
        answer.extend(feed(&mut from, &greeting).unwrap().0);
        assert!(matches!(feed(&mut from, &answer), Err(HandshakeError::Unproven)));
    }

    #[test]
    fn a_handshake_that_is_sent_again_proves_nothing() {
        let (mut from, mut to) = sides();
        let mut said = from.output();
        let greeting = feed(&mut to, &said).unwrap().0;
        let proof = feed(&mut from, &greeting).unwrap().0;
        assert_eq!(feed(&mut to, &proof).unwrap().1.unwrap(), b"from");
        said.extend(proof);
        let mut again = Handshake::accept(&token(), b"to").unwrap();
        assert!(matches!(feed(&mut again, &said), Err(HandshakeError::Unproven)));
    }

    #[test]
    fn every_byte_of_both_sides_counts() {
        // Greetings of 42 bytes; lengths, hellos and proofs of 40 and 39, in front of one an answer.
        let mut unproven = 0;
        for changed in 0..42 + 42 + 40 + 39_usize {
            let (mut from, mut to) = sides();
            let mut at = 0;
            let mut on_the_way = |mut bytes: Vec<u8>| {
                if let Some(byte) = changed.checked_sub(at).and_then(|index| bytes.get_mut(index)) {
                    *byte ^= 1;
                }
                at += bytes.len();
                bytes
            };
            let outcome = (|| {
                let greeting = on_the_way(from.output());
                let greeting = on_the_way(feed(&mut to, &greeting)?.0);
                let proof = on_the_way(feed(&mut from, &greeting)?.0);
                let answer = on_the_way(feed(&mut to, &proof)?.0);
                Ok::<_, HandshakeError>(feed(&mut from, &answer)?.1)
            })();
            // A changed length makes a side wait for ever.
            assert!(matches!(outcome, Err(_) | Ok(None)), "byte {changed}");
            unproven += usize::from(matches!(outcome, Err(HandshakeError::Unproven)));
        }
        // Changed nonces, hellos and proofs.
        assert_eq!(unproven, 2 * 32 + (4 + 32) + (2 + 32));
    }

    #[test]
    fn another_version_is_named_by_both_sides() {
        let mut newer = MAGIC.to_vec();
        newer.extend(2_u16.to_le_bytes());
        let (mut from, mut to) = sides();
        let error = to.take(&newer).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the peer speaks protocol 2, this build speaks 1; run one build everywhere"
        );
        // Its own version is still said, for the newer side to name.
        assert_eq!(to.output()[..10], [&MAGIC[..], &[1, 0]].concat());
        assert!(matches!(from.take(&newer), Err(HandshakeError::Version { theirs: 2 })));
    }

    #[test]
    fn strangers_are_recognised_by_their_first_bytes() {
        for bytes in [&b"GET / HTTP"[..], &[0; 10], b"SSH-2.0-Op", b"zerocomn\x01\x00"] {
            let (mut from, mut to) = sides();
            assert!(matches!(to.take(bytes), Err(HandshakeError::Stranger)));
            assert!(to.output().is_empty());
            assert!(matches!(from.take(bytes), Err(HandshakeError::Stranger)));
        }
    }

    #[test]
    fn a_long_hello_is_refused_before_it_is_read_and_before_it_is_said() {
        let (mut from, mut to) = sides();
        let greeting = from.output();
        feed(&mut to, &greeting).unwrap();
        let length = (MAX_HELLO as u32 + 1).to_le_bytes();
        assert!(matches!(to.take(&length), Err(HandshakeError::TooLong(4097))));
        assert!(Handshake::connect(&token(), &[0; MAX_HELLO]).is_ok());
        assert!(Handshake::connect(&token(), &[0; MAX_HELLO + 1]).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_taken_by_both_sides(mut bytes: Vec<u8>, greets: bool) {
            let (from, to) = sides();
            if greets {
                bytes.splice(..0, [&MAGIC[..], &VERSION.to_le_bytes(), &[7; NONCE]].concat());
            }
            for mut side in [from, to] {
                let mut rest = bytes.as_slice();
                while let Some((wanted, left)) = rest.split_at_checked(side.wants()) {
                    rest = left;
                    match side.take(wanted) {
                        Ok(None) => {}
                        Ok(Some(hello)) => prop_assert!(false, "a proof was guessed: {hello:?}"),
                        Err(_) => break,
                    }
                }
            }
        }
    }
}
