//! Frames of the CNI socket: four bytes of length (big endian), then JSON. The pod's network namespace comes as a
//! descriptor beside the first bytes.

use std::fs::File;
use std::io::{self, IoSliceMut, Read, Write};
use std::net::IpAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

use nix::cmsg_space;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::bandwidth::Bandwidth;
use super::host_ports::PortMapping;
use super::record::Key;
use super::{CniError, Code};
use crate::netlink::link::Mac;

/// Bytes of a request at most. GC lists every attachment of a node and is the longest.
const MAX_REQUEST_BYTES: usize = 1024 * 1024;
/// Interface names hold 15 bytes.
const MAX_IFNAME_BYTES: usize = 15;
/// Bytes of a container id at most: it becomes part of a file name.
const MAX_CONTAINER_ID_BYTES: usize = 128;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum Command {
    Add,
    Del,
    Check,
    Status,
    Gc,
}

/// What the plugin asks for. Fields that a command does not use stay empty.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Request {
    pub(super) command: Command,
    #[serde(default)]
    pub(super) network: String,
    #[serde(default)]
    pub(super) container_id: String,
    #[serde(default)]
    pub(super) if_name: String,
    /// Path of the namespace in the runtime's mount namespace: for the result and for people, never opened here.
    #[serde(default)]
    pub(super) netns: String,
    #[serde(default)]
    pub(super) args: Map<String, Value>,
    /// CHECK: addresses with prefix length that the runtime remembers.
    #[serde(default)]
    pub(super) addresses: Vec<String>,
    /// ADD: ports of the node that lead to the pod.
    #[serde(default)]
    pub(super) port_mappings: Vec<PortMapping>,
    /// ADD: addresses that the runtime wants for the pod; with none the agent chooses.
    #[serde(default)]
    pub(super) wanted: Vec<String>,
    /// ADD: MAC address that the runtime wants for the pod; empty leaves the choice to the agent.
    #[serde(default)]
    pub(super) mac: String,
    /// ADD: what the pod may send and receive.
    #[serde(default)]
    pub(super) bandwidth: Option<Bandwidth>,
    /// ADD: addresses that an IPAM plugin has given to the pod; with none they come from the node's own ranges.
    #[serde(default)]
    pub(super) delegated: Vec<String>,
    /// STATUS: addresses come from an IPAM plugin.
    #[serde(default)]
    pub(super) delegates: bool,
    /// GC: what must stay.
    #[serde(default)]
    pub(super) valid_attachments: Vec<Key>,
}

impl Request {
    /// The attachment that the request is about.
    pub(super) fn key(&self) -> Result<Key, CniError> {
        let id = &self.container_id;
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
        let good_id = id.starts_with(|c: char| c.is_ascii_alphanumeric())
            && id.len() <= MAX_CONTAINER_ID_BYTES
            && id.chars().all(plain);
        let name = &self.if_name;
        let bad = |c: char| matches!(c, '/' | ':') || c.is_whitespace() || c.is_control();
        let good_name = !name.is_empty()
            && name.len() <= MAX_IFNAME_BYTES
            && !matches!(name.as_str(), "." | "..")
            && !name.contains(bad);
        if good_id && good_name {
            return Ok(Key {
                container_id: id.clone(),
                if_name: name.clone(),
            });
        }
        let message = format!("CNI_CONTAINERID {id:?} or CNI_IFNAME {name:?} is not valid");
        Err(CniError::new(Code::InvalidEnvironment, message))
    }

    /// ADD: what the runtime wants for the pod.
    pub(super) fn wanted_addresses(&self) -> Result<Vec<IpAddr>, CniError> {
        addresses("runtimeConfig.ips", &self.wanted)
    }

    /// ADD: what an IPAM plugin gave.
    pub(super) fn delegated_addresses(&self) -> Result<Vec<IpAddr>, CniError> {
        addresses("the result of the IPAM plugin", &self.delegated)
    }

    /// ADD: the MAC address that the runtime wants.
    pub(super) fn mac(&self) -> Result<Option<Mac>, CniError> {
        if self.mac.is_empty() {
            return Ok(None);
        }
        let bytes = self.mac.split([':', '-']);
        let bytes: Option<Vec<u8>> = bytes
            .map(|byte| {
                u8::from_str_radix(byte, 16)
                    .ok()
                    .filter(|_| byte.len() == 2)
            })
            .collect();
        let mac = bytes.and_then(|bytes| Mac::try_from(bytes.as_slice()).ok());
        match mac {
            Some(mac) if mac[0] & 1 == 0 && mac != Mac::default() => Ok(Some(mac)),
            _ => {
                let message = format!("runtimeConfig.mac is {:?}", self.mac);
                Err(CniError::new(Code::InvalidConfig, message)
                    .with_details("use the unicast address of one station, like 02:00:5e:10:00:01"))
            }
        }
    }

    /// A value of CNI_ARGS.
    pub(super) fn arg(&self, key: &str) -> String {
        self.args
            .get(key)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    }
}

/// A prefix length says nothing here: the link has whole addresses.
fn addresses(whose: &str, texts: &[String]) -> Result<Vec<IpAddr>, CniError> {
    let address = |text: &String| {
        let bare = text.split_once('/').map_or(text.as_str(), |(ip, _)| ip);
        bare.parse().map_err(|e| {
            let message = format!("{whose} has {text:?}, which is no address");
            CniError::new(Code::InvalidConfig, message).with_details(e)
        })
    };
    texts.iter().map(address).collect()
}

/// Reads one request and the namespace that came with it.
pub(super) fn read_request(stream: &mut UnixStream) -> Result<(Request, Option<File>), CniError> {
    let unreadable =
        |e: io::Error| CniError::new(Code::Io, "read request of weir-cni").with_details(e);
    let (head, netns) = read_head(stream).map_err(unreadable)?;
    let length = u32::from_be_bytes(head) as usize;
    if length > MAX_REQUEST_BYTES {
        let message = format!("request of {length} bytes is too large");
        return Err(CniError::new(Code::Decode, message));
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).map_err(unreadable)?;
    let request = serde_json::from_slice(&body).map_err(|e| {
        CniError::new(
            Code::Decode,
            "request of weir-cni cannot be read; is it of the agent's version?",
        )
        .with_details(e)
    })?;
    Ok((request, netns))
}

/// The length, and the descriptor that came along.
fn read_head(stream: &mut UnixStream) -> io::Result<([u8; 4], Option<File>)> {
    let mut head = [0; 4];
    let mut space = cmsg_space!([RawFd; 1]);
    let mut netns = None;
    let received = {
        let mut parts = [IoSliceMut::new(&mut head)];
        let message = recvmsg::<()>(
            stream.as_raw_fd(),
            &mut parts,
            Some(&mut space),
            MsgFlags::MSG_CMSG_CLOEXEC,
        )?;
        for control in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(fds) = control {
                for fd in fds {
                    netns = Some(reopen(fd)?);
                }
            }
        }
        message.bytes
    };
    if received == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    stream.read_exact(&mut head[received..])?;
    Ok((head, netns))
}

/// Takes over a received descriptor: opened anew by way of /proc, the number given back.
fn reopen(fd: RawFd) -> io::Result<File> {
    let file = File::open(format!("/proc/self/fd/{fd}"));
    nix::unistd::close(fd)?;
    file
}

/// Writes the reply.
pub(super) fn write_reply(
    stream: &mut UnixStream,
    outcome: &Result<Value, CniError>,
) -> io::Result<()> {
    let reply = match outcome {
        Ok(value) => json!({ "ok": value }),
        Err(e) => {
            json!({ "error": { "code": e.code.number(), "msg": e.message, "details": e.details } })
        }
    };
    let body = serde_json::to_vec(&reply)?;
    let length = u32::try_from(body.len()).map_err(io::Error::other)?;
    let mut frame = length.to_be_bytes().to_vec();
    frame.extend_from_slice(&body);
    stream.write_all(&frame)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn send(bytes: &[u8]) -> Result<(Request, Option<File>), CniError> {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(bytes).unwrap();
        drop(theirs);
        read_request(&mut ours)
    }

    fn frame(body: &str) -> Vec<u8> {
        let mut bytes = u32::try_from(body.len()).unwrap().to_be_bytes().to_vec();
        bytes.extend_from_slice(body.as_bytes());
        bytes
    }

    #[test]
    fn a_request_is_read() {
        let body = r#"{"command":"ADD","containerId":"c1","ifName":"eth0","args":{"K8S_POD_NAME":"p"},"later":1}"#;
        let (request, netns) = send(&frame(body)).unwrap();
        assert_eq!(request.command, Command::Add);
        assert_eq!(request.arg("K8S_POD_NAME"), "p");
        assert_eq!(request.key().unwrap().host_name().len(), 15);
        assert!(netns.is_none());
    }

    #[test]
    fn keys_that_could_leave_their_folder_are_refused() {
        for (id, name) in [
            ("../x", "eth0"),
            ("", "eth0"),
            ("c1", ""),
            ("c1", ".."),
            ("c1", "a/b"),
            ("-a", "x"),
        ] {
            let body = json!({ "command": "DEL", "containerId": id, "ifName": name }).to_string();
            let (request, _) = send(&frame(&body)).unwrap();
            assert_eq!(request.key().unwrap_err().code, Code::InvalidEnvironment);
        }
    }

    #[test]
    fn a_mac_is_one_stations_address() {
        let read = |text: &str| {
            let body = json!({ "command": "ADD", "mac": text }).to_string();
            send(&frame(&body)).unwrap().0.mac()
        };
        assert_eq!(read("").unwrap(), None);
        assert_eq!(
            read("02:00:5E:10-00:01").unwrap(),
            Some([2, 0, 0x5e, 0x10, 0, 1])
        );
        for bad in [
            "02:00:5e:10:00",
            "2:0:5e:10:0:1",
            "01:00:5e:00:00:01",
            "00:00:00:00:00:00",
            "x",
        ] {
            assert_eq!(read(bad).unwrap_err().code, Code::InvalidConfig, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_answered_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = send(&bytes);
            let _ = send(&frame(&String::from_utf8_lossy(&bytes)));
        }
    }
}
