//! Which rank runs where.

use std::collections::BTreeSet;
use std::str::FromStr;

use zero_core::{Rank, WorldSize};

use crate::ProcessWorld;

/// A machine of `--hosts`, and how many ranks it is to run, if that is said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    name: String,
    ranks: Option<usize>,
}

impl FromStr for Host {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, ranks) = match text.split_once(':') {
            Some((name, ranks)) => (name, Some(ranks)),
            None => (text, None),
        };
        // What begins with a dash would be an option of the remote shell.
        if name.is_empty() || name.starts_with('-') || name.contains(char::is_whitespace) {
            return Err(format!("{name:?} is no name of a host"));
        }
        // Of an IPv6 address the rest is no number.
        let ranks = ranks.map(self::ranks).transpose()?;
        Ok(Self { name: name.to_owned(), ranks })
    }
}

/// Reads a number of ranks.
pub(crate) fn ranks(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(ranks @ 1..=ProcessWorld::MAX_RANKS) => Ok(ranks),
        _ => Err(format!("{text:?} is no number of ranks from 1 to {}", ProcessWorld::MAX_RANKS)),
    }
}

/// Where one rank runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) rank: Rank,
    /// Its number among the ranks of its machine.
    pub(crate) local_rank: usize,
    /// How many ranks its machine runs.
    pub(crate) local_world_size: WorldSize,
    /// The machine; `None` is this one.
    pub(crate) host: Option<String>,
}

/// Why ranks cannot be placed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PlacementError {
    #[error("--hosts says for some hosts how many ranks they run and not for others; say it for all or none")]
    SomeCounts,
    #[error(
        "-n {ranks} does not agree with --hosts, whose ranks add up to {sum}; correct one or leave out -n"
    )]
    Disagree { ranks: usize, sum: usize },
    #[error("-n {ranks} cannot be divided evenly by {hosts} hosts; say how many each runs: --hosts a:2,b:1")]
    Uneven { ranks: usize, hosts: usize },
    #[error("how many ranks? give -n, or numbers with --hosts a:2,b:2")]
    NoCount,
    #[error("--hosts names the machine {name:?} twice; add its ranks up")]
    Twice { name: String },
}

/// Places the ranks in the order of `hosts`; without hosts, all of them here.
///
/// `machine` is this machine's own name.
pub(crate) fn places(
    ranks: Option<usize>,
    hosts: &[Host],
    machine: &str,
) -> Result<Vec<Place>, PlacementError> {
    let here = [Host { name: "localhost".to_owned(), ranks: None }];
    let hosts = if hosts.is_empty() { &here } else { hosts };
    let counts = counts(ranks, hosts)?;

    let mut seen = BTreeSet::new();
    let mut places = Vec::new();
    for (host, count) in hosts.iter().zip(counts) {
        let name = (!is_here(&host.name, machine)).then(|| host.name.clone());
        if !seen.insert(name.clone()) {
            return Err(PlacementError::Twice { name: host.name.clone() });
        }
        let local_world_size = WorldSize::new(count).ok_or(PlacementError::NoCount)?;
        for local_rank in 0..count {
            let rank = Rank::new(places.len());
            places.push(Place { rank, local_rank, local_world_size, host: name.clone() });
        }
    }
    Ok(places)
}

fn counts(ranks: Option<usize>, hosts: &[Host]) -> Result<Vec<usize>, PlacementError> {
    let given: Vec<usize> = hosts.iter().filter_map(|host| host.ranks).collect();
    if !given.is_empty() {
        let sum = given.iter().sum();
        return match ranks {
            _ if given.len() < hosts.len() => Err(PlacementError::SomeCounts),
            Some(ranks) if ranks != sum => Err(PlacementError::Disagree { ranks, sum }),
            _ => Ok(given),
        };
    }
    let ranks = ranks.ok_or(PlacementError::NoCount)?;
    if ranks % hosts.len() != 0 {
        return Err(PlacementError::Uneven { ranks, hosts: hosts.len() });
    }
    Ok(vec![ranks / hosts.len(); hosts.len()])
}

fn is_here(name: &str, machine: &str) -> bool {
    let short = machine.split('.').next();
    name == "localhost" || name == "127.0.0.1" || name == machine || Some(name) == short
}

#[cfg(test)]
mod tests {
    use super::{Host, PlacementError, places};

    fn hosts(text: &str) -> Vec<Host> {
        text.split(',').map(|host| host.parse().unwrap()).collect()
    }

    /// For each rank its host, its local rank and its local world size.
    fn placed(ranks: Option<usize>, text: &str) -> Result<Vec<(String, usize, usize)>, PlacementError> {
        let hosts = if text.is_empty() { Vec::new() } else { hosts(text) };
        let places = places(ranks, &hosts, "me.cluster")?;
        assert!(places.iter().enumerate().all(|(index, place)| place.rank.index() == index));
        let host = |host: Option<String>| host.unwrap_or_default();
        Ok(places
            .into_iter()
            .map(|place| (host(place.host), place.local_rank, place.local_world_size.get()))
            .collect())
    }

    fn place(host: &str, local_rank: usize, size: usize) -> (String, usize, usize) {
        (host.to_owned(), local_rank, size)
    }

    #[test]
    fn without_hosts_all_ranks_are_here() {
        assert_eq!(placed(Some(2), ""), Ok(vec![place("", 0, 2), place("", 1, 2)]));
    }

    #[test]
    fn ranks_follow_the_order_of_hosts() {
        let expected = vec![place("b", 0, 1), place("a", 0, 2), place("a", 1, 2)];
        assert_eq!(placed(None, "b:1,a:2"), Ok(expected.clone()));
        assert_eq!(placed(Some(3), "b:1,a:2"), Ok(expected));
    }

    #[test]
    fn hosts_without_numbers_get_equal_shares() {
        assert_eq!(placed(Some(2), "a,b"), Ok(vec![place("a", 0, 1), place("b", 0, 1)]));
        assert_eq!(placed(Some(3), "a,b"), Err(PlacementError::Uneven { ranks: 3, hosts: 2 }));
        assert_eq!(placed(Some(1), "a,b"), Err(PlacementError::Uneven { ranks: 1, hosts: 2 }));
    }

    #[test]
    fn this_machine_has_several_names() {
        for name in ["localhost", "127.0.0.1", "me", "me.cluster"] {
            assert_eq!(placed(Some(1), name), Ok(vec![place("", 0, 1)]), "{name}");
        }
        assert_eq!(placed(Some(1), "me.other"), Ok(vec![place("me.other", 0, 1)]));
    }

    #[test]
    fn what_does_not_add_up_is_refused() {
        assert_eq!(placed(None, "a,b"), Err(PlacementError::NoCount));
        assert_eq!(placed(None, ""), Err(PlacementError::NoCount));
        assert_eq!(placed(Some(4), "a:2,b"), Err(PlacementError::SomeCounts));
        assert_eq!(placed(Some(4), "a:2,b:1"), Err(PlacementError::Disagree { ranks: 4, sum: 3 }));
        assert_eq!(placed(None, "a:1,b:1,a:1"), Err(PlacementError::Twice { name: "a".into() }));
        assert_eq!(placed(None, "me:1,localhost:1"), Err(PlacementError::Twice { name: "localhost".into() }));
    }

    #[test]
    fn a_host_that_cannot_be_one_is_refused() {
        for text in
            ["", ":2", "-oProxyCommand=x:1", "a b", "a:", "a:0", "a:x", "a:-1", "fe80::1:2", "a:99999"]
        {
            assert!(text.parse::<Host>().is_err(), "{text}");
        }
    }
}
