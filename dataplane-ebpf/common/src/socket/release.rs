//! The end of a socket: everything that is known of it goes.

use super::{
    ClientFamily, Cookie, DestinationKey, MAX_SOCKET_DESTINATIONS, SocketTables, SourceKey, UseKey,
};
use crate::address::{TCP, UDP};

/// Forgets a socket that is closed. `protocol` tells what it can have.
#[inline(always)]
pub fn release<A: ClientFamily, T: SocketTables<A>>(
    tables: &mut T,
    cookie: &Cookie,
    protocol: u32,
) {
    release_by(tables, cookie, protocol, release_destination::<A, T>);
}

/// As [`release`], with [`release_destination`] or a function that does the same.
#[inline(always)]
pub fn release_by<A: ClientFamily, T: SocketTables<A>>(
    tables: &mut T,
    cookie: &Cookie,
    protocol: u32,
    release_destination: impl Fn(&mut T, &Cookie, u32) -> bool,
) {
    if protocol == TCP as u32 {
        tables.remove_connection(cookie);
    } else if protocol == UDP as u32 {
        let mut index = 0;
        while index < MAX_SOCKET_DESTINATIONS && release_destination(tables, cookie, index) {
            index += 1;
        }
    }
}

/// Forgets the destination of a datagram socket with this number. False when it has none.
#[inline(always)]
pub fn release_destination<A: ClientFamily, T: SocketTables<A>>(
    tables: &mut T,
    cookie: &Cookie,
    index: u32,
) -> bool {
    let usage = UseKey {
        cookie: *cookie,
        index,
    };
    let Some(place) = tables.usage(&usage) else {
        return false;
    };
    let destination = DestinationKey {
        cookie: *cookie,
        place: *place,
    };
    if let Some(flow) = tables.socket_flow(&destination) {
        // Whatever the answers of its backend count as, no other flow of this socket has that backend.
        let source = SourceKey {
            cookie: *cookie,
            place: flow.backend,
        };
        tables.remove_origin(&source);
        tables.remove_socket_flow(&destination);
    }
    tables.remove_usage(&usage);
    true
}
