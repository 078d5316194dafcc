//! How much crosses between ranks, and who can get between them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use zero_core::{DType, Rank, WorldSize};

use super::mesh_plane::MeshPlane;
use super::plane::{Plane, ranges};
use super::shm::{Hall, Segment, Shape, SharedFile};
use super::standing::Standing;
use super::wait::{Operation, Wait};
use super::{Fabric, posted};
use crate::control::Token;
use crate::control::strangers::{are_shown_the_door, visit};
use crate::flight::GroupId;
use crate::request::Request;
use crate::tcp::TcpFabric;
use crate::{OpKind, ReduceOp};

const HOW: (ReduceOp, DType) = (ReduceOp::Sum, DType::F32);

/// How much each rank has of what is moved: whole chunks, so that chunks can be counted.
const PART: usize = 10 * CHUNK;
const CHUNK: usize = 4096;

fn standing(rank: usize, size: usize) -> Arc<Standing> {
    Standing::new(Rank::new(rank), WorldSize::new(size).unwrap(), None, mpsc::channel().0)
}

fn wait(standing: &Standing) -> Wait<'_> {
    let operation = Operation { kind: OpKind::Barrier, label: "", sequence: 1, expected: &[] };
    Wait::new(standing, operation, Duration::from_secs(60))
}

/// Runs `f` on as many ranks, each with a fabric of its own; before they connect, `visit` gets all addresses.
fn on_fabrics(
    size: usize,
    visit: impl FnOnce(&[SocketAddr]),
    f: impl Fn(&TcpFabric, &MeshPlane, &mut Wait<'_>) + Sync,
) {
    let (token, members) = (Token::generate().unwrap(), (0..size).map(Rank::new).collect::<Vec<_>>());
    let doors: Vec<_> =
        members.iter().map(|_| TcpFabric::bind(IpAddr::V4(Ipv4Addr::LOCALHOST)).unwrap()).collect();
    let addresses: Vec<_> = doors.iter().map(|door| door.address()).collect();
    let fabrics: Vec<_> = doors
        .into_iter()
        .enumerate()
        .map(|(rank, door)| {
            let standing = standing(rank, size);
            let known = addresses.iter().copied().map(Some).collect();
            (Arc::clone(&standing), door.start(standing, known, token.clone()).unwrap())
        })
        .collect();
    visit(&addresses);
    thread::scope(|scope| {
        for (rank, (standing, fabric)) in fabrics.iter().enumerate() {
            let (members, f) = (&members, &f);
            scope.spawn(move || {
                let mut wait = wait(standing);
                let others: Vec<_> =
                    members.iter().copied().filter(|member| member.index() != rank).collect();
                let links = fabric.collective(GroupId::WORLD, &others, &mut wait).unwrap();
                f(fabric, &MeshPlane::new(links, members, rank), &mut wait);
            });
        }
    });
}

fn parts(size: usize) -> Vec<Range<usize>> {
    ranges(&vec![PART; size], 1)
}

#[test]
fn a_network_carries_no_more_than_what_others_need() {
    for size in 2..=5 {
        on_fabrics(
            size,
            |_| (),
            |fabric, plane, wait| {
                let others = (size - 1) as u64;
                let needed = others * PART as u64;
                let mut before = (0, 0);
                let mut moved = || {
                    let now = fabric.moved();
                    let moved = (now.0 - before.0, now.1 - before.1);
                    before = now;
                    moved
                };
                let (whole, mut part) = (vec![0; size * PART], vec![0; PART]);
                plane.reduce_scatter(HOW, &whole, &parts(size), &mut part, wait).unwrap().unwrap();
                assert_eq!(moved(), (needed, needed));
                let mut whole = whole;
                plane.all_gather(&part, &mut whole, &parts(size), wait).unwrap();
                assert_eq!(moved(), (needed, needed));
                plane.all_reduce(HOW, &mut whole, wait).unwrap().unwrap();
                assert_eq!(moved(), (2 * needed, 2 * needed));
                // What is said of each operation before.
                let counts = vec![PART / 4; size];
                let request = Request::ReduceScatter { dtype: DType::F32, counts, op: ReduceOp::Sum };
                let head = posted::encode(&request, "layer.12.weight");
                plane.post(&[&head], wait, &mut |_| ()).unwrap();
                let said = others * (head.len() as u64 + 8);
                assert_eq!(moved(), (said, said));
                assert!(head.len() <= 64, "{}", head.len());
            },
        );
    }
}

#[test]
fn shared_memory_carries_no_more_than_what_others_need() {
    for size in 1..=5 {
        let shape = Shape { seats: size, post_bytes: CHUNK, chunk_bytes: CHUNK, chunks: 4 };
        let file = SharedFile::create().unwrap();
        file.set_length(shape.bytes() as u64).unwrap();
        thread::scope(|scope| {
            for seat in 0..size {
                let file = &file;
                scope.spawn(move || {
                    let segment = Arc::new(Segment::map(file, 0, shape.bytes()).unwrap());
                    let hall = Hall::new(segment, 0, shape, seat, (0..size).map(Rank::new).collect());
                    let (standing, chunks) = (standing(seat, size), (PART / CHUNK) as u64);
                    let wait = &mut wait(&standing);
                    let others = (size - 1) as u64;
                    let (mut whole, mut part) = (vec![0; size * PART], vec![0; PART]);
                    hall.reduce_scatter(HOW, &whole, &parts(size), &mut part, wait).unwrap().unwrap();
                    assert_eq!(hall.written(), others * chunks);
                    // All read the same chunks.
                    hall.all_gather(&part, &mut whole, &parts(size), wait).unwrap();
                    assert_eq!(hall.written(), (others + 1) * chunks);
                });
            }
        });
    }
}

#[test]
fn strangers_at_a_data_port_are_shown_the_door_and_nobody_is_disturbed() {
    let mut strangers = Vec::new();
    on_fabrics(
        3,
        |addresses| strangers = addresses.iter().flat_map(|address| visit(*address)).collect(),
        |_, plane, wait| {
            let mut whole = vec![0; 3 * PART];
            plane.all_reduce(HOW, &mut whole, wait).unwrap().unwrap();
        },
    );
    for told in are_shown_the_door(strangers) {
        assert!(told.len() <= 43 && told.get(42).is_none_or(|answer| *answer == 0), "{told:?}");
    }
}

#[test]
fn a_crowd_at_a_data_port_does_not_keep_ranks_out() {
    let mut crowd = Vec::new();
    on_fabrics(
        2,
        |addresses| {
            let connect = |address| std::net::TcpStream::connect(address).unwrap();
            crowd = addresses.iter().flat_map(|address| (0..200).map(move |_| connect(address))).collect();
        },
        |_, plane, wait| plane.post(&[b"here"], wait, &mut |posts| assert_eq!(posts, [b"here"; 2])).unwrap(),
    );
    are_shown_the_door(crowd);
}
