//! Map access by `bpf(2)`: typed, by shared reference, and in batches, which aya does not offer.

use std::ffi::CString;
use std::io;
use std::marker::PhantomData;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use dataplane_common::layout::{
    Affinity, AffinityKey, Backend, Datagram, Endpoint, Flow, FlowKey, FragmentKey, Frontend,
    FrontendKey, Link, MaglevBlock, MaglevKey, Node, Park, PodPolicy, PolicyRule, PolicyRuleKey,
    PolicyState, Range, RangeKey, SlotBlock, SlotKey, SourceRangeKey,
};
use dataplane_common::socket::{
    Connection, Cookie, DestinationKey, Namespace, Place, SocketFlow, SourceKey, UseKey,
};
use dataplane_common::{V4, V6};

const BPF_MAP_LOOKUP_ELEM: libc::c_int = 1;
const BPF_MAP_UPDATE_ELEM: libc::c_int = 2;
const BPF_MAP_DELETE_ELEM: libc::c_int = 3;
const BPF_MAP_GET_NEXT_KEY: libc::c_int = 4;
const BPF_OBJ_GET: libc::c_int = 7;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_MAP_LOOKUP_AND_DELETE_ELEM: libc::c_int = 21;
const BPF_MAP_LOOKUP_BATCH: libc::c_int = 24;
const BPF_MAP_UPDATE_BATCH: libc::c_int = 26;
const BPF_LINK_DETACH: libc::c_int = 34;

/// `BPF_NOEXIST`: never replaces.
const ONLY_NEW: u64 = 1;
/// What kernels without an operation for a map type answer, besides `EINVAL`; libc does not name it.
const ENOTSUPP: libc::c_int = 524;

/// Room for the kernel's opaque position in a batch walk; at least the size of any key.
const POSITION_BYTES: usize = 64;

/// Types that may cross the door as bytes.
///
/// # Safety
/// `repr(C)` or an integer, without padding, valid for every bit pattern.
pub(super) unsafe trait Plain: Copy + 'static {}

macro_rules! plain {
    ($($type:ty),+ $(,)?) => {
        // SAFETY: see `dataplane_common::layout`, which asserts sizes and pads explicitly.
        $(unsafe impl Plain for $type {})+
    };
}

plain!(
    u32,
    u64,
    V4,
    V6,
    Endpoint,
    Link,
    Frontend,
    SlotKey,
    SlotBlock,
    Node<V4>,
    Node<V6>
);
plain!(
    FlowKey<V4>,
    FlowKey<V6>,
    Flow<V4>,
    Flow<V6>,
    FrontendKey<V4>,
    FrontendKey<V6>
);
plain!(
    Backend<V4>,
    Backend<V6>,
    AffinityKey<V4>,
    AffinityKey<V6>,
    Affinity
);
plain!(
    RangeKey<V4>,
    RangeKey<V6>,
    Range,
    SourceRangeKey<V4>,
    SourceRangeKey<V6>,
    MaglevKey,
    MaglevBlock
);

plain!(
    Cookie,
    Namespace,
    UseKey,
    Place<V4>,
    Place<V6>,
    Connection<V4>,
    Connection<V6>
);
plain!(
    DestinationKey<V4>,
    DestinationKey<V6>,
    SocketFlow<V4>,
    SocketFlow<V6>,
    SourceKey<V4>,
    SourceKey<V6>
);
plain!(FragmentKey<V4>, FragmentKey<V6>, Datagram, Park);
plain!(PodPolicy, PolicyRuleKey, PolicyRule, PolicyState);

#[repr(C)]
#[derive(Default)]
struct ElementAttr {
    map_fd: u32,
    pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
#[derive(Default)]
struct BatchAttr {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    element_flags: u64,
    flags: u64,
}

#[repr(C)]
#[derive(Default)]
struct ObjectAttr {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct InfoAttr {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

/// The start of the kernel's `bpf_map_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MapInfo {
    kind: u32,
    id: u32,
    pub(super) key_size: u32,
    pub(super) value_size: u32,
    pub(super) max_entries: u32,
    map_flags: u32,
}

/// Calls `bpf(2)`.
///
/// # Safety
/// Every address inside `attr` must be valid for what `command` does with it.
pub(super) unsafe fn bpf<T>(command: libc::c_int, attr: &mut T) -> io::Result<libc::c_long> {
    // SAFETY: by the caller; the kernel reads no more than the size given.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_mut(attr),
            size_of::<T>(),
        )
    };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn address<T>(value: &T) -> u64 {
    std::ptr::from_ref(value) as u64
}

#[allow(
    clippy::cast_sign_loss,
    reason = "an open file descriptor is not negative"
)]
fn number(fd: &OwnedFd) -> u32 {
    fd.as_raw_fd() as u32
}

/// A pinned map.
#[derive(Debug)]
pub(super) struct Table<K, V> {
    fd: OwnedFd,
    pub(super) name: &'static str,
    pub(super) max_entries: u32,
    entry: PhantomData<(K, V)>,
}

/// Where a batch walk stands. A new one starts at the beginning.
#[derive(Clone, Debug)]
pub(super) struct Position {
    bytes: [u8; POSITION_BYTES],
    started: bool,
}

impl Default for Position {
    fn default() -> Self {
        Self {
            bytes: [0; POSITION_BYTES],
            started: false,
        }
    }
}

/// One batch of a walk.
#[derive(Debug)]
pub(super) struct Batch<K, V> {
    pub(super) entries: Vec<(K, V)>,
    /// Nothing follows.
    pub(super) last: bool,
}

impl<K: Plain, V: Plain> Table<K, V> {
    /// Opens the map pinned as `directory/name` and checks that it has this shape.
    pub(super) fn open(directory: &Path, name: &'static str) -> io::Result<Self> {
        let fd = open_pin(&directory.join(name))?;
        let info = map_info(&fd)?;
        // Values of per-CPU maps are read elsewhere; the kernel reports their size for one CPU.
        if info.key_size as usize != size_of::<K>() || info.value_size as usize != size_of::<V>() {
            return Err(io::Error::other(format!(
                "key and value of {} and {} bytes, expected {} and {}: it is not of this ABI version",
                info.key_size,
                info.value_size,
                size_of::<K>(),
                size_of::<V>()
            )));
        }
        Ok(Self {
            fd,
            name,
            max_entries: info.max_entries,
            entry: PhantomData,
        })
    }

    fn element(&self, key: u64, value: u64, flags: u64) -> ElementAttr {
        ElementAttr {
            map_fd: number(&self.fd),
            pad: 0,
            key,
            value,
            flags,
        }
    }

    pub(super) fn get(&self, key: &K) -> io::Result<Option<V>> {
        let mut value = MaybeUninit::<V>::uninit();
        let mut attr = self.element(address(key), value.as_mut_ptr() as u64, 0);
        // SAFETY: key and value have the sizes that `open` checked.
        match unsafe { bpf(BPF_MAP_LOOKUP_ELEM, &mut attr) } {
            // SAFETY: the kernel wrote all of it.
            Ok(_) => Ok(Some(unsafe { value.assume_init() })),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Adds or replaces.
    pub(super) fn put(&self, key: &K, value: &V) -> io::Result<()> {
        let mut attr = self.element(address(key), address(value), 0);
        // SAFETY: key and value have the sizes that `open` checked.
        unsafe { bpf(BPF_MAP_UPDATE_ELEM, &mut attr) }.map(drop)
    }

    /// Adds or replaces all of these, in their order. After an error those before it are in place.
    pub(super) fn put_all(&self, keys: &[K], values: &[V]) -> io::Result<()> {
        const BATCH: usize = 4_096;
        for (keys, values) in keys.chunks(BATCH).zip(values.chunks(BATCH)) {
            let mut attr = BatchAttr {
                keys: keys.as_ptr() as u64,
                values: values.as_ptr() as u64,
                count: u32::try_from(keys.len().min(values.len())).unwrap_or(0),
                map_fd: number(&self.fd),
                ..BatchAttr::default()
            };
            // SAFETY: both slices hold at least `count` elements of the sizes that `open` checked.
            unsafe { bpf(BPF_MAP_UPDATE_BATCH, &mut attr) }?;
        }
        Ok(())
    }

    /// As [`Self::put_all`], one by one where the kernel has no batches for this type of map.
    pub(super) fn put_all_or_each(&self, keys: &[K], values: &[V]) -> io::Result<()> {
        match self.put_all(keys, values) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | ENOTSUPP)) => {
                let mut entries = keys.iter().zip(values);
                entries.try_for_each(|(key, value)| self.put(key, value))
            }
            other => other,
        }
    }

    /// True when there was something to remove.
    pub(super) fn remove(&self, key: &K) -> io::Result<bool> {
        let mut attr = self.element(address(key), 0, 0);
        // SAFETY: the key has the size that `open` checked.
        match unsafe { bpf(BPF_MAP_DELETE_ELEM, &mut attr) } {
            Ok(_) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Adds; leaves what is there. True when it was added.
    pub(super) fn put_new(&self, key: &K, value: &V) -> io::Result<bool> {
        let mut attr = self.element(address(key), address(value), ONLY_NEW);
        // SAFETY: key and value have the sizes that `open` checked.
        match unsafe { bpf(BPF_MAP_UPDATE_ELEM, &mut attr) } {
            Ok(_) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes, and tells what was there: in one step from Linux 5.14 on, in two before.
    pub(super) fn take(&self, key: &K) -> io::Result<Option<V>> {
        let mut value = MaybeUninit::<V>::uninit();
        let mut attr = self.element(address(key), value.as_mut_ptr() as u64, 0);
        // SAFETY: key and value have the sizes that `open` checked.
        match unsafe { bpf(BPF_MAP_LOOKUP_AND_DELETE_ELEM, &mut attr) } {
            // SAFETY: the kernel wrote all of it.
            Ok(_) => Ok(Some(unsafe { value.assume_init() })),
            Err(error) => match error.raw_os_error() {
                Some(libc::ENOENT) => Ok(None),
                Some(libc::EINVAL | ENOTSUPP) => {
                    let value = self.get(key)?;
                    Ok(if self.remove(key)? { value } else { None })
                }
                _ => Err(error),
            },
        }
    }

    /// Up to about `count` further entries, from `position` on.
    pub(super) fn batch(&self, position: &mut Position, count: usize) -> io::Result<Batch<K, V>> {
        let mut count = u32::try_from(count).unwrap_or(u32::MAX).max(1);
        loop {
            let mut keys: Vec<K> = Vec::with_capacity(count as usize);
            let mut values: Vec<V> = Vec::with_capacity(count as usize);
            let mut next = [0u8; POSITION_BYTES];
            let mut attr = BatchAttr {
                in_batch: if position.started {
                    position.bytes.as_ptr() as u64
                } else {
                    0
                },
                out_batch: next.as_mut_ptr() as u64,
                keys: keys.as_mut_ptr() as u64,
                values: values.as_mut_ptr() as u64,
                count,
                map_fd: number(&self.fd),
                ..BatchAttr::default()
            };
            // SAFETY: both vectors have room for `count`, the position has room for any key.
            let result = unsafe { bpf(BPF_MAP_LOOKUP_BATCH, &mut attr) };
            let last = match result {
                Ok(_) => false,
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
                // One bucket holds more than there is room for.
                Err(error)
                    if error.raw_os_error() == Some(libc::ENOSPC) && count < self.max_entries =>
                {
                    count = count.saturating_mul(2);
                    continue;
                }
                Err(error) => return Err(error),
            };
            // SAFETY: the kernel wrote this many, and never more than the capacity.
            unsafe {
                keys.set_len(attr.count as usize);
                values.set_len(attr.count as usize);
            }
            *position = if last {
                Position::default()
            } else {
                Position {
                    bytes: next,
                    started: true,
                }
            };
            return Ok(Batch {
                entries: keys.into_iter().zip(values).collect(),
                last,
            });
        }
    }

    /// Every entry, one key after the other.
    fn walk(&self) -> io::Result<Vec<(K, V)>> {
        let mut all = Vec::new();
        let mut key: Option<K> = None;
        loop {
            let mut next = MaybeUninit::<K>::uninit();
            let from = key.as_ref().map_or(0, address);
            let mut attr = self.element(from, next.as_mut_ptr() as u64, 0);
            // SAFETY: both keys have the size that `open` checked; without a first one the walk starts.
            match unsafe { bpf(BPF_MAP_GET_NEXT_KEY, &mut attr) } {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(all),
                Err(error) => return Err(error),
            }
            // SAFETY: the kernel wrote all of it.
            let next = unsafe { next.assume_init() };
            if let Some(value) = self.get(&next)? {
                all.push((next, value));
            }
            key = Some(next);
        }
    }

    /// Every entry. Entries that come or go meanwhile may be missed.
    pub(super) fn entries(&self) -> io::Result<Vec<(K, V)>> {
        const BATCH: usize = 4_096;
        let mut all = Vec::new();
        let mut position = Position::default();
        loop {
            let batch = match self.batch(&mut position, BATCH) {
                // Tries have no batches on kernels of the oldest lines.
                Err(e) if e.raw_os_error() == Some(ENOTSUPP) => return self.walk(),
                other => other?,
            };
            all.extend(batch.entries);
            if batch.last {
                return Ok(all);
            }
        }
    }
}

/// Per-CPU counters, summed.
#[derive(Debug)]
pub(super) struct CounterTable {
    fd: OwnedFd,
    pub(super) name: &'static str,
    cpus: usize,
}

impl CounterTable {
    pub(super) fn open(directory: &Path, name: &'static str) -> io::Result<Self> {
        let fd = open_pin(&directory.join(name))?;
        let cpus = aya::util::nr_cpus().map_err(|(_, error)| error)?;
        Ok(Self { fd, name, cpus })
    }

    pub(super) fn sum(&self, index: u32) -> io::Result<u64> {
        let mut values = vec![0u64; self.cpus];
        let mut attr = ElementAttr {
            map_fd: number(&self.fd),
            key: address(&index),
            value: values.as_mut_ptr() as u64,
            ..ElementAttr::default()
        };
        // SAFETY: the value has one word for each possible CPU.
        unsafe { bpf(BPF_MAP_LOOKUP_ELEM, &mut attr) }?;
        Ok(values.iter().sum())
    }
}

/// Opens a pinned object.
pub(super) fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = ObjectAttr {
        pathname: path.as_ptr() as u64,
        ..ObjectAttr::default()
    };
    // SAFETY: the path ends in a zero byte and outlives the call.
    let fd = unsafe { bpf(BPF_OBJ_GET, &mut attr) }?;
    let fd = i32::try_from(fd).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    // SAFETY: the kernel gave this descriptor to us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// How many entries a pinned map may hold, and whether it holds any; arrays always do.
pub(super) fn size_of_pin(path: &Path) -> io::Result<(u32, bool)> {
    let fd = open_pin(path)?;
    let mut key = [0u8; POSITION_BYTES];
    let mut attr = ElementAttr {
        map_fd: number(&fd),
        value: key.as_mut_ptr() as u64,
        ..ElementAttr::default()
    };
    // SAFETY: without a first key the walk starts; there is room for any key of our maps.
    let holds = match unsafe { bpf(BPF_MAP_GET_NEXT_KEY, &mut attr) } {
        Ok(_) => true,
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => false,
        Err(error) => return Err(error),
    };
    Ok((map_info(&fd)?.max_entries, holds))
}

/// Detaches a pinned link at once. Removing its pin alone leaves that to a later moment.
pub(super) fn detach_link(path: &Path) -> io::Result<()> {
    #[repr(C)]
    struct DetachAttr {
        link_fd: u32,
    }
    let fd = open_pin(path)?;
    let mut attr = DetachAttr {
        link_fd: number(&fd),
    };
    // SAFETY: the structure holds no address.
    unsafe { bpf(BPF_LINK_DETACH, &mut attr) }.map(drop)
}

fn map_info(fd: &OwnedFd) -> io::Result<MapInfo> {
    let mut info = MapInfo::default();
    let mut attr = InfoAttr {
        bpf_fd: number(fd),
        info_len: u32::try_from(size_of::<MapInfo>()).unwrap_or(0),
        info: std::ptr::from_mut(&mut info) as u64,
    };
    // SAFETY: the kernel writes no more than the length given.
    unsafe { bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr) }?;
    Ok(info)
}
