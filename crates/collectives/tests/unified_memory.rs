//! Memory that host and GPU reach, over CUDA's driver or what stands for it (`cargo xtask cuda-check --and-tests`), which
//! puts off what is asked of it as long as CUDA may.

#[cfg(not(feature = "cuda"))]
#[test]
fn unified_memory() {
    println!("skipped: this build is without the feature cuda");
}

#[cfg(feature = "cuda")]
mod cuda {
    #![allow(unsafe_code, reason = "work is put into streams by address")]

    use candle_core::cuda::cudarc::driver::{CudaContext, CudaStream, result};
    use sconce_collectives::Buffer;
    use sconce_collectives::cuda::{UnifiedMemory, device_count, is_unified};
    use std::sync::Arc;

    const HALF: usize = 1000;

    fn memory() -> Option<(Arc<CudaContext>, Arc<UnifiedMemory>)> {
        if !device_count().is_ok_and(|count| count > 0) {
            println!("skipped: no driver of CUDA's is here, nor its stand-in");
            return None;
        }
        let context = CudaContext::new(0).unwrap();
        let memory = UnifiedMemory::of(&context.new_stream().unwrap()).unwrap();
        memory.map(|memory| (context, memory))
    }

    fn set(buffer: &mut Buffer, value: u8, stream: &Arc<CudaStream>) {
        let lent = buffer.lend_mut(stream).unwrap();
        // SAFETY: the buffer has two halves, and is lent for writing.
        unsafe { result::memset_d8_async(lent.pointer(), value, HALF, stream.cu_stream()) }.unwrap();
    }

    #[test]
    fn work_in_several_streams_and_the_host_come_one_after_the_other() {
        let Some((context, memory)) = memory() else { return };
        let other = context.new_stream().unwrap();
        let mut buffer = memory.allocate(2 * HALF).unwrap();
        assert!(buffer.is_unified() && !buffer.is_shared() && buffer.len() == 2 * HALF);
        assert_eq!(buffer.as_slice::<u8>(), [0; 2 * HALF]);
        for value in 1..4 {
            set(&mut buffer, value, memory.stream());
            let lent = buffer.lend_mut(&other).unwrap();
            let (from, to) = (lent.pointer(), lent.pointer() + HALF as u64);
            // SAFETY: the buffer has two halves, and is lent for writing.
            unsafe { result::memcpy_dtod_async(to, from, HALF, other.cu_stream()) }.unwrap();
            drop(lent);
            // Not before the copy has read it.
            set(&mut buffer, 9, memory.stream());
            let mut expected = [9; 2 * HALF];
            expected[HALF..].fill(value);
            assert_eq!(buffer.for_peers::<u8>(), expected);
            buffer.as_mut_slice::<u8>()[0] = 7;
            expected[0] = 7;
            assert_eq!(buffer.as_slice::<u8>(), expected);
        }
        assert_eq!(memory.host_accesses(), 7);
    }

    #[test]
    fn memory_is_freed_behind_the_work_that_has_it_and_told_from_other_memory() {
        let Some((_, memory)) = memory() else { return };
        let mut buffer = memory.allocate(2 * HALF).unwrap();
        set(&mut buffer, 1, memory.stream());
        // The stand-in ends the program for memory that work under way has.
        drop(buffer);
        let buffer = memory.allocate(0).unwrap();
        assert!(buffer.is_empty() && buffer.lend(memory.stream()).is_ok());
        let buffer = memory.allocate(HALF).unwrap();
        assert!(is_unified(&buffer.as_slice::<u8>()[1..]));
        let mut heap = Buffer::on_heap(HALF);
        assert!(!is_unified(heap.as_slice()));
        assert!(heap.lend_mut(memory.stream()).is_err());
    }
}
