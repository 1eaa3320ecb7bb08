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
    if protocol == TCP as u32 {
        tables.remove_connection(cookie);
    } else if protocol == UDP as u32 {
        release_datagrams(tables, cookie);
    }
}

#[inline(always)]
fn release_datagrams<A: ClientFamily, T: SocketTables<A>>(tables: &mut T, cookie: &Cookie) {
    let mut index = 0;
    while index < MAX_SOCKET_DESTINATIONS {
        let usage = UseKey {
            cookie: *cookie,
            index,
        };
        index += 1;
        let Some(place) = tables.usage(&usage) else {
            return;
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
    }
}
