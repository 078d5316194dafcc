//! What all ranks are started with.

use std::ffi::OsStr;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::cli::LaunchOptions;
use super::environment;
use super::error::LaunchError;
use super::job::GRACE_AFTER_FAILURE;
use super::placement::Place;
use super::rank::{Outlets, RankProcess};
use super::remote::Order;
use crate::Token;
use crate::last_words::LAST_WORDS;

/// Starts ranks of one job.
pub(crate) struct Starter<'a> {
    cli: &'a LaunchOptions,
    /// For the ranks' last words.
    folder: &'a Path,
    /// Where the ranks run, on other machines too.
    working_folder: PathBuf,
    token: Token,
    /// What begins a line of news from another machine. The ranks do not know it.
    mark: String,
    rendezvous: SocketAddr,
    ranks: usize,
}

impl<'a> Starter<'a> {
    pub(crate) fn new(
        cli: &'a LaunchOptions,
        folder: &'a Path,
        (rendezvous, token): (SocketAddr, Token),
        ranks: usize,
    ) -> Result<Self, LaunchError> {
        let working_folder = std::env::current_dir().map_err(LaunchError::NoFolder)?;
        let mark = Token::generate().map_err(LaunchError::Random)?.to_hex();
        Ok(Self { cli, folder, working_folder, token, mark, rendezvous, ranks })
    }

    pub(crate) fn start(&self, place: Place, outlets: &Outlets) -> Result<RankProcess, LaunchError> {
        let variables = environment::of_rank(&place, self.ranks, self.rendezvous, &self.token);
        let last_words = self.folder.join(format!("rank-{}.json", place.rank.index()));
        let (command, remote) = match &place.host {
            None => {
                let mut command = command(&self.cli.command);
                for name in environment::foreign() {
                    command.env_remove(name);
                }
                command.envs(variables).env(LAST_WORDS, &last_words);
                (command, None)
            }
            Some(host) => {
                let mut command = command(&self.cli.rsh.0);
                command.arg(host).args(["sh", "-s"]);
                let order = Order {
                    command: &self.cli.command,
                    folder: &self.working_folder,
                    variables: &variables,
                    grace: self.cli.grace.unwrap_or(GRACE_AFTER_FAILURE),
                    mark: &self.mark,
                };
                let script = order.script();
                let script = script.map_err(|source| LaunchError::Attend { rank: place.rank, source })?;
                (command, Some((script, self.mark.clone())))
            }
        };
        RankProcess::start(place, command, last_words, remote, outlets)
    }
}

/// A program and its arguments. The command line has at least the program.
fn command(words: &[impl AsRef<OsStr>]) -> Command {
    let mut words = words.iter();
    let mut command = Command::new(words.next().map_or(OsStr::new(""), AsRef::as_ref));
    command.args(words);
    command
}
