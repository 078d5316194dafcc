//! Ranks whose hosts have a network between them, and what they learn when it is cut.

use std::process::{self, Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use zero_comm::CommError;
use zero_core::Rank;

use crate::child::Scenario;
use crate::ranks::{Leader, Worlds};

const DEADLINE: Duration = Duration::from_secs(2);

/// Network namespaces, one for each rank, with links to a bridge in another. Dropped, they are gone.
struct Network {
    names: Vec<String>,
    switch: String,
}

impl Network {
    /// `None`, with a word on why, where this process may not make networks.
    fn new(ranks: usize) -> Option<Self> {
        let name = |what: &str| format!("zero-comm-{}-{what}", process::id());
        let network =
            Self { names: (0..ranks).map(|rank| name(&rank.to_string())).collect(), switch: name("switch") };
        match network.build() {
            Ok(()) => Some(network),
            Err(why) => {
                println!("skipped: no networks can be made here: {why}");
                None
            }
        }
    }

    fn build(&self) -> Result<(), String> {
        let switch = &self.switch;
        ip(&format!("netns add {switch}"))?;
        ip(&format!("-n {switch} link add bridge type bridge"))?;
        ip(&format!("-n {switch} link set bridge up"))?;
        for (rank, name) in self.names.iter().enumerate() {
            ip(&format!("netns add {name}"))?;
            ip(&format!("-n {switch} link add port{rank} type veth peer name wire netns {name}"))?;
            ip(&format!("-n {switch} link set port{rank} master bridge up"))?;
            ip(&format!("-n {name} addr add {}/24 dev wire", address(rank)))?;
            ip(&format!("-n {name} link set wire up"))?;
            ip(&format!("-n {name} link set lo up"))?;
        }
        Ok(())
    }

    fn prefixes(&self) -> Vec<Vec<String>> {
        let words = |name: &String| ["ip", "netns", "exec", name].map(str::to_owned).to_vec();
        self.names.iter().map(words).collect()
    }

    fn cut(&self, rank: usize) {
        ip(&format!("-n {} link set port{rank} down", self.switch)).unwrap();
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in self.names.iter().chain([&self.switch]) {
            // It may never have come about.
            let _ = ip(&format!("netns del {name}"));
        }
    }
}

fn address(rank: usize) -> String {
    format!("10.77.0.{}", rank + 1)
}

fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split(' ')).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("ip: {error}"))?;
    let told = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("ip {arguments}: {}", told.trim())) }
}

#[test]
fn a_rank_whose_network_is_cut_is_named() {
    for victim in [0, 2] {
        for scenario in [Scenario::Wait { victim: 3 }, Scenario::Move] {
            let Some(network) = Network::new(3) else { return };
            let worlds = Worlds::new(&[0, 1, 2], DEADLINE)
                .led_by(Leader::RankZeroAt(address(0), 29_400))
                .with_prefixes(network.prefixes());
            let mut ranks = worlds.start(scenario);
            ranks.are_ready();
            network.cut(victim);
            ranks.go_on();
            for rank in 0..3 {
                let error = ranks.error(rank);
                let named = match &error {
                    CommError::Timeout { missing, .. } => missing.clone(),
                    CommError::PeerLost { rank, .. } => vec![*rank],
                    _ => panic!("got {error:?}"),
                };
                if rank == victim {
                    // It sees that others are gone.
                    assert!(
                        !named.is_empty() && !named.contains(&Rank::new(rank)),
                        "on rank {rank}: {error}"
                    );
                } else {
                    assert_eq!(named, [Rank::new(victim)], "on rank {rank}: {error}");
                }
            }
            // What could not be said to the other side may keep a process for a while.
            (0..3).for_each(|rank| ranks.signal(rank, Signal::KILL));
            ranks.leave_nothing();
        }
    }
}
