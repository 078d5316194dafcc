//! A rank's being there.

use std::sync::Arc;
use std::thread;

use super::fabric::Fabric;
use super::standing::Standing;
use super::world::Backstage;

use crate::LossCause;
use crate::failure::Failure;

/// Shared by all communicators of one rank: the rank has finished when the last of them is gone.
#[derive(Debug)]
pub(crate) struct Presence {
    standing: Arc<Standing>,
    backstage: Option<Backstage>,
}

impl Presence {
    /// When the rank has finished, `backstage` serves the others until they have.
    pub(crate) const fn new(standing: Arc<Standing>, backstage: Backstage) -> Self {
        Self { standing, backstage: Some(backstage) }
    }

    /// What reaches the other ranks.
    pub(crate) fn fabric(&self) -> Option<&dyn Fabric> {
        self.backstage.as_ref().map(|backstage| &*backstage.fabric)
    }

    pub(crate) const fn standing(&self) -> &Arc<Standing> {
        &self.standing
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        if thread::panicking() {
            let cause = LossCause::Panicked("its thread unwound".to_owned());
            self.standing.fail(Failure::Lost { rank: self.standing.rank(), cause });
        } else {
            self.standing.finish();
        }
        if self.standing.is_over() {
            return;
        }
        let (standing, backstage) = (Arc::clone(&self.standing), self.backstage.take());
        let serve = move || {
            standing.linger();
            drop(backstage);
        };
        // Without a thread the others have to do without what this rank leaves.
        if let Err(error) = thread::Builder::new().name("zero-comm-rest".to_owned()).spawn(serve) {
            tracing::warn!(%error, "no thread to serve the ranks that have not finished");
        }
    }
}
