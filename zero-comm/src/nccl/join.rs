//! How ranks come to have a communicator.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::CudaContext;
use serde::{Deserialize, Serialize};
use zero_core::Rank;

use super::agreement::Agreement;
use super::communicator::NcclCommunicator;
use super::control::{LABEL, verdict};
use super::device;
use super::error::NcclError;
use super::handle::{self, Handle, Refusal};
use super::library::{Library, UniqueId};
use super::patience::watch;
use super::session::Session;
use crate::{Communicator, CommunicatorExt, OpKind};

/// What a rank brings: all but the identifier must be the same on all.
#[derive(Serialize, Deserialize)]
struct Card {
    version: String,
    agreement: Agreement,
    /// Only the first rank brings one.
    id: Option<Vec<u8>>,
}

/// Joins the ranks of `control`, whose names in errors are `members`.
pub(super) fn join(
    control: Arc<dyn Communicator>,
    members: Vec<Rank>,
    device: usize,
    agreement: Agreement,
) -> Result<NcclCommunicator, NcclError> {
    let name = members[control.rank().index()];
    let prepared = prepare(name, control.rank() == Rank::ROOT, device, agreement);
    let ((library, context), cards) = verdict(&*control, &members, prepared)?;
    let id = same(&members, &cards)?;
    let connected = connect(&*control, name, library, &context, id);
    let (handle, _) = verdict(&*control, &members, connected.map(|handle| (handle, ())))?;
    tracing::debug!(rank = %name, world_size = %control.world_size(), device, "joined devices");
    Ok(NcclCommunicator::from_parts(control, members, context, agreement, handle))
}

type Prepared = ((&'static Library, Arc<CudaContext>), Card);

/// Does what needs no other rank.
fn prepare(name: Rank, first: bool, device: usize, agreement: Agreement) -> Result<Prepared, NcclError> {
    let library = Library::get()?;
    let context = device::context(device)?;
    let id = first.then(|| handle::unique_id(library)).transpose();
    let id = id.map_err(|refusal| refusal.during(format!("making an identifier on {name}")))?;
    let version = library.version.to_string();
    Ok(((library, context), Card { version, agreement, id: id.map(|UniqueId(bytes)| bytes.to_vec()) }))
}

/// The identifier of the first of `cards`, if the ranks fit together.
fn same(members: &[Rank], cards: &[Card]) -> Result<UniqueId, NcclError> {
    let unlike = |second: usize, what: &str, one: &str, other: &str| NcclError::Unlike {
        first: members[0],
        one: format!("{what} {one}"),
        second: members[second],
        other: format!("{what} {other}"),
    };
    let first = &cards[0];
    for (position, card) in cards.iter().enumerate() {
        if card.version != first.version {
            return Err(unlike(position, "NCCL", &first.version, &card.version));
        }
        if card.agreement != first.agreement {
            let [one, other] = [first, card].map(|card| format!("{:?}", card.agreement));
            return Err(unlike(position, "agreement", &one, &other));
        }
    }
    let id = first.id.as_deref().and_then(|id| id.try_into().ok()).map(UniqueId);
    id.ok_or_else(|| NcclError::Peer { rank: members[0], reason: "it brought no identifier".to_owned() })
}

fn connect(
    control: &dyn Communicator,
    name: Rank,
    library: &'static Library,
    context: &CudaContext,
    id: UniqueId,
) -> Result<Handle, NcclError> {
    let during = || format!("connecting {name}");
    context.bind_to_thread().map_err(|error| NcclError::Driver { during: during(), error })?;
    let mut handle = Handle::join(library, control.world_size().get(), id, control.rank().index())
        .map_err(|refusal| refusal.during(during()))?;
    connected(control, name, &mut handle, during)?;
    Ok(handle)
}

/// Waits until NCCL has connected the ranks.
fn connected(
    control: &dyn Communicator,
    name: Rank,
    handle: &mut Handle,
    during: impl Fn() -> String,
) -> Result<(), NcclError> {
    // The other half is for telling the others.
    let after: Duration = control.deadline() / 2;
    let ready = || handle.ready().map_err(|refusal| refusal.during(during()));
    let news = || control.check(OpKind::Join, LABEL).map_err(NcclError::from);
    let ready = watch(after, ready, news)?;
    ready.ok_or_else(|| NcclError::Connect { rank: name, world_size: control.world_size(), after })
}

/// Splits `parent`, on whose `session` nothing is under way.
pub(super) fn split(
    parent: &NcclCommunicator,
    session: &mut Session,
    color: Option<u64>,
    key: u64,
    label: &str,
) -> Result<Option<NcclCommunicator>, NcclError> {
    let (control, name) = (parent.control(), parent.name());
    let during = || format!("{} {label:?} on {name}", OpKind::Split);
    let group = match control.split(color, key, label)? {
        Some(control) => {
            let names = control.all_gather_value(name.index() as i64, label)?;
            Some((control, names.into_iter().map(|name| Rank::new(name as usize)).collect::<Vec<_>>()))
        }
        None => None,
    };
    // The lowest name is the group's alone, and fits NCCL's narrower numbers.
    let color = group.as_ref().and_then(|(_, members)| members.iter().map(|name| name.index()).min());
    let key = group.as_ref().map_or(0, |(control, _)| control.rank().index());
    let context = parent.context();
    let made = (|| {
        context.bind_to_thread().map_err(|error| NcclError::Driver { during: during(), error })?;
        let splitting = session.handle.split(color, key).map_err(|refusal| refusal.during(during()))?;
        connected(&**control, name, &mut session.handle, during)?;
        // SAFETY: the communicator that is split has become ready.
        let handle = unsafe { splitting.finish() };
        if handle.is_some() == color.is_some() {
            return Ok(handle);
        }
        let message = "done, but there is no communicator for this rank's color".to_owned();
        Err(Refusal { function: "ncclCommSplit", code: 0, message }.during(during()))
    })();
    let (handle, _) = verdict(&**control, parent.members(), made.map(|handle| (handle, ())))?;
    let made = group.zip(handle).map(|((control, members), handle)| {
        NcclCommunicator::from_parts(control, members, Arc::clone(context), parent.agreement(), handle)
    });
    Ok(made)
}
