//! Options of a connection between processes of a job.

use std::io;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

/// How long a host may be out of reach before its connections break. The kernel of a host answers for
/// processes that are stopped, so this is about networks and hosts only.
const CUT: Duration = Duration::from_secs(10);

/// Sends at once, and notices when the peer's host is gone.
pub(crate) fn tune<'a>(socket: impl Into<SockRef<'a>>) -> io::Result<()> {
    let socket = socket.into();
    socket.set_tcp_nodelay(true)?;
    let alive = TcpKeepalive::new().with_time(CUT / 2).with_interval(CUT / 5).with_retries(3);
    socket.set_tcp_keepalive(&alive)?;
    // Keepalive is for silence; this is for what was sent and not acknowledged.
    socket.set_tcp_user_timeout(Some(CUT))?;
    Ok(())
}
