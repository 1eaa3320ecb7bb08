//! Things by small numbers. A number is given away again only after the changes in which it was used have been told.

#[derive(Debug)]
pub(super) struct Slab<T> {
    items: Vec<Option<T>>,
    free: Vec<u32>,
    leaving: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self {
            items: Vec::new(),
            free: Vec::new(),
            leaving: Vec::new(),
        }
    }
}

impl<T> Slab<T> {
    pub(super) fn insert(&mut self, item: T) -> u32 {
        if let Some(id) = self.free.pop() {
            self.items[id as usize] = Some(item);
            return id;
        }
        let id = u32::try_from(self.items.len()).unwrap_or(u32::MAX);
        self.items.push(Some(item));
        id
    }

    /// Gone for lookups now; the number stays taken until [`Slab::settle`].
    pub(super) fn remove(&mut self, id: u32) -> Option<T> {
        let item = self.items.get_mut(id as usize)?.take()?;
        self.leaving.push(id);
        Some(item)
    }

    pub(super) fn settle(&mut self) {
        self.free.append(&mut self.leaving);
    }

    pub(super) fn get(&self, id: u32) -> Option<&T> {
        self.items.get(id as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, id: u32) -> Option<&mut T> {
        self.items.get_mut(id as usize)?.as_mut()
    }

    #[cfg(test)]
    pub(super) fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        (0u32..)
            .zip(&self.items)
            .filter(|(_, item)| item.is_some())
            .map(|(id, _)| id)
    }
}
