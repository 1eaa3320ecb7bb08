//! What the allocator keeps of memory that nobody uses any more. The agent needs much of it for a moment, when a whole
//! state comes, and little afterwards.

/// Lets all threads share two heaps: each one's unused part counts as memory of the process. To be called before the
/// first thread starts.
pub fn share_heaps() {
    #[cfg(target_env = "gnu")]
    {
        const HEAPS: libc::c_int = 2;
        // SAFETY: plain numbers; an allocator that does not know the option ignores it.
        let _known = unsafe { libc::mallopt(libc::M_ARENA_MAX, HEAPS) };
    }
}

/// Gives unused memory back to the kernel. Takes milliseconds for a large heap.
pub fn give_back_memory() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: a plain number; the allocator locks what it works on.
        let _any = unsafe { libc::malloc_trim(0) };
    }
}

/// Lets go of a part of the program's file that is not needed any more. It comes back when it is read again.
pub(super) fn give_back_file(bytes: &'static [u8]) {
    /// The largest page of the machines we know: whole ones only.
    const PAGE: usize = 65_536;
    let start = (bytes.as_ptr() as usize).next_multiple_of(PAGE);
    let end = (bytes.as_ptr() as usize + bytes.len()) / PAGE * PAGE;
    if start < end {
        // SAFETY: the pages lie within a constant, which nobody can have written: what is read again is the same.
        let _kept = unsafe {
            libc::madvise(
                std::ptr::with_exposed_provenance_mut(start),
                end - start,
                libc::MADV_DONTNEED,
            )
        };
    }
}
