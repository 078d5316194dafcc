//! What ranks tell each other on their hosts.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use zero_core::Rank;

use super::error::NcclError;
use crate::{Communicator, CommunicatorExt};

/// The label of what is sent for this.
pub(super) const LABEL: &str = "making a communicator of devices";

/// Why a rank could not do its part.
#[derive(Serialize, Deserialize)]
struct Excuse {
    reason: String,
    /// Whether it only waited in vain, so that the reason is another rank's.
    waited: bool,
}

/// Lets all ranks know how `mine` went: returns it with what all ranks tell of theirs, or fails on all ranks
/// if it failed on one.
///
/// `members` are the names of the ranks in errors.
pub(super) fn verdict<T, P: Serialize + DeserializeOwned>(
    control: &dyn Communicator,
    members: &[Rank],
    mine: Result<(T, P), NcclError>,
) -> Result<(T, Vec<P>), NcclError> {
    let told = match &mine {
        Ok((_, told)) => Ok(told),
        Err(error) => Err(Excuse { reason: error.to_string(), waited: waited(error) }),
    };
    let told =
        serde_json::to_vec(&told).expect("numbers and text can be written as JSON, and memory takes it");
    let all = control.all_gather_bytes(&told, LABEL);
    let mine = match mine {
        Err(error) if !waited(&error) => return Err(error),
        mine => mine,
    };
    let all: Vec<Result<P, Excuse>> = all?
        .iter()
        .map(|bytes| serde_json::from_slice(bytes).unwrap_or_else(|error| Err(Excuse::strange(&error))))
        .collect();
    let fault = |vain: bool| {
        let mut ranks = members.iter().zip(&all);
        ranks.find_map(|(rank, told)| match told {
            Err(excuse) if excuse.waited == vain => Some((*rank, excuse.reason.clone())),
            _ => None,
        })
    };
    match (mine, fault(false)) {
        (_, Some((rank, reason))) => Err(NcclError::Peer { rank, reason }),
        (Err(error), None) => Err(error),
        (Ok((value, _)), None) => match fault(true) {
            Some((rank, reason)) => Err(NcclError::Peer { rank, reason }),
            None => Ok((value, all.into_iter().flatten().collect())),
        },
    }
}

const fn waited(error: &NcclError) -> bool {
    matches!(error, NcclError::Connect { .. })
}

impl Excuse {
    fn strange(error: &serde_json::Error) -> Self {
        let reason = format!("it does not tell how it went ({error}); run one version of the program");
        Self { reason, waited: false }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use zero_core::WorldSize;

    use super::*;
    use crate::{CommError, LocalWorld, WorldError};

    fn outcomes(
        mine: impl Fn(usize) -> Result<((), usize), NcclError> + Sync,
    ) -> Vec<Result<Vec<usize>, NcclError>> {
        let size = WorldSize::new(3).unwrap();
        let members: Vec<_> = (10..13).map(Rank::new).collect();
        let outcomes = LocalWorld::new(size).with_deadline(Duration::from_secs(60)).run(|control| {
            let outcome = verdict(&*control, &members, mine(control.rank().index())).map(|((), told)| told);
            // The world goes on.
            control.barrier("after")?;
            Ok::<_, CommError>(outcome)
        });
        outcomes.unwrap_or_else(|error: WorldError<_>| panic!("{error}"))
    }

    fn missing() -> NcclError {
        NcclError::NoSuchDevice { device: 7, count: 2 }
    }

    fn in_vain() -> NcclError {
        NcclError::Connect { rank: Rank::ROOT, world_size: WorldSize::ONE, after: Duration::ZERO }
    }

    #[test]
    fn what_all_ranks_tell_is_known_to_all() {
        assert_eq!(outcomes(|rank| Ok(((), rank * 2))), vec![Ok(vec![0, 2, 4]); 3]);
    }

    #[test]
    fn one_fault_is_everybody_s_error() {
        let outcomes = outcomes(|rank| if rank == 1 { Err(missing()) } else { Ok(((), 0)) });
        let peer = Err(NcclError::Peer { rank: Rank::new(11), reason: missing().to_string() });
        assert_eq!(outcomes, [peer.clone(), Err(missing()), peer]);
    }

    #[test]
    fn who_waited_in_vain_learns_for_whom() {
        let outcomes_with_fault = outcomes(|rank| Err(if rank == 2 { missing() } else { in_vain() }));
        let peer = Err(NcclError::Peer { rank: Rank::new(12), reason: missing().to_string() });
        assert_eq!(outcomes_with_fault, [peer.clone(), peer, Err(missing())]);

        let outcomes = outcomes(|rank| if rank == 1 { Err(in_vain()) } else { Ok(((), 0)) });
        let peer = Err(NcclError::Peer { rank: Rank::new(11), reason: in_vain().to_string() });
        assert_eq!(outcomes, [peer.clone(), Err(in_vain()), peer]);
    }
}
