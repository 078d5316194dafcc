//! A process of a team: takes orders from a connection and answers with times.

use std::env;
use std::error::Error;
use std::hint::black_box;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use zero_comm::{Communicator, CommunicatorExt, LocalWorld, Meeting, ProcessWorld, ReduceOp, Token};
use zero_core::{Rank, WorldSize};

use crate::team::Kind;
use crate::{LARGEST, Operation};

/// The environment variable that has the token of a world of processes.
pub(crate) const TOKEN: &str = "ZERO_COMM_BENCH_TOKEN";

type Anything = Box<dyn Error + Send + Sync>;

pub(crate) struct Worker {
    kind: Kind,
    rank: Rank,
    size: WorldSize,
    /// Where orders come from.
    orders: SocketAddr,
    /// Where the ranks of a world of processes meet.
    coordinator: String,
}

impl Worker {
    /// What follows `--worker`: the team's name, the rank, the world size and two addresses.
    pub(crate) fn from_arguments(arguments: &[String]) -> Result<Option<Self>, Box<dyn Error>> {
        let [_, flag, kind, rank, size, orders, coordinator] = arguments else { return Ok(None) };
        let kind = Kind::ALL.into_iter().find(|known| flag == "--worker" && known.name() == kind);
        let Some(kind) = kind else { return Ok(None) };
        Ok(Some(Self {
            kind,
            rank: Rank::new(rank.parse()?),
            size: WorldSize::new(size.parse()?).ok_or("a world without ranks")?,
            orders: orders.parse()?,
            coordinator: coordinator.clone(),
        }))
    }

    pub(crate) fn work(&self) -> Result<(), Box<dyn Error>> {
        match self.kind {
            Kind::CopyingThreads | Kind::InProcess => {
                LocalWorld::new(self.size).run(|comm| self.serve(&comm))?;
            }
            Kind::CopyingProcesses | Kind::SharedMemory | Kind::Tcp | Kind::Gloo => {
                let meeting = Meeting::Coordinator { address: self.coordinator.clone() };
                let world = ProcessWorld::new(self.rank, self.size, meeting)
                    .with_token(env::var(TOKEN)?.parse::<Token>()?);
                let host = if self.kind == Kind::Tcp { self.rank.index() } else { 0 };
                let world = world.with_host(format!("host {host}"));
                world.run(|comm| self.serve(&comm))?;
            }
        }
        Ok(())
    }

    /// Does what is ordered until the connection ends.
    fn serve(&self, comm: &Arc<dyn Communicator>) -> Result<(), Anything> {
        let mut buffers = Buffers::new();
        let mut connection = TcpStream::connect(self.orders)?;
        connection.set_nodelay(true)?;
        let orders = BufReader::new(connection.try_clone()?);
        for order in orders.lines() {
            let order = order?;
            let words: Vec<_> = order.split(' ').collect();
            let [operation, bytes, times] = words[..] else {
                return Err(format!("no order: {order}").into());
            };
            let operation = Operation::ALL.into_iter().find(|known| known.name() == operation);
            let operation = operation.ok_or_else(|| format!("no order: {order}"))?;
            let (bytes, times) = (bytes.parse()?, times.parse::<u32>()?);
            let mut act = || match self.kind {
                Kind::CopyingThreads | Kind::CopyingProcesses => {
                    buffers.copy(bytes);
                    Ok(())
                }
                _ => buffers.act(&**comm, operation, bytes),
            };
            act()?;
            comm.barrier("")?;
            let begin = Instant::now();
            for _ in 0..times {
                act()?;
            }
            let seconds = begin.elapsed().as_secs_f64() / f64::from(times);
            writeln!(connection, "{seconds}")?;
        }
        Ok(())
    }
}

/// What the operations work on; large enough for all, and in memory already.
struct Buffers {
    whole: Vec<f32>,
    result: Vec<f32>,
}

impl Buffers {
    fn new() -> Self {
        Self { whole: vec![1.0; LARGEST / 4], result: vec![1.0; LARGEST / 4] }
    }

    fn copy(&mut self, bytes: usize) {
        let elements = bytes / 4;
        self.result[..elements].copy_from_slice(black_box(&self.whole[..elements]));
        black_box(&mut self.result);
    }

    fn act(&mut self, comm: &dyn Communicator, operation: Operation, bytes: usize) -> Result<(), Anything> {
        if bytes == size_of::<f64>() {
            comm.all_reduce_value(1.0_f64, ReduceOp::Sum, "")?;
            return Ok(());
        }
        let elements = bytes / 4;
        let part = elements / comm.world_size().get();
        let (whole, result) = (&mut self.whole[..elements], &mut self.result[..elements]);
        match operation {
            Operation::AllReduce => comm.all_reduce(whole, ReduceOp::Sum, "")?,
            Operation::AllGather => comm.all_gather(&whole[..part], result, "")?,
            Operation::ReduceScatter => {
                comm.reduce_scatter(whole, &mut result[..part], ReduceOp::Sum, "")?;
            }
        }
        Ok(())
    }
}
